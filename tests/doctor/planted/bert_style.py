"""BERT-like encoder and its decoder twin."""

import math

import torch
from torch import nn


class BertConfigLike:
    def __init__(self, is_decoder=False):
        self.hidden_size = 48
        self.num_attention_heads = 4
        self.vocab_size = 100
        self.max_position_embeddings = 64
        self.num_hidden_layers = 2
        self.attention_probs_dropout_prob = 0.0
        self.is_decoder = is_decoder


class SelfAttentionLike(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.hidden_size // config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def transpose_for_scores(self, x):
        new_x_shape = x.size()[:-1] + (self.num_attention_heads, self.attention_head_size)
        return x.view(new_x_shape).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        attention_scores = attention_scores + attention_mask
        attention_probs = self.dropout(nn.functional.softmax(attention_scores, dim=-1))
        context_layer = torch.matmul(attention_probs, value_layer).permute(0, 2, 1, 3).contiguous()
        return context_layer.view(context_layer.size()[:-2] + (-1,))


class ModelLike(nn.Module):
    def __init__(self, config=None):
        super().__init__()
        self.config = config or BertConfigLike()
        self.word_embeddings = nn.Embedding(self.config.vocab_size, self.config.hidden_size)
        self.position_embeddings = nn.Embedding(self.config.max_position_embeddings, self.config.hidden_size)
        self.layer = nn.ModuleList([SelfAttentionLike(self.config) for _ in range(self.config.num_hidden_layers)])
        self.norm = nn.LayerNorm(self.config.hidden_size)

    def get_extended_attention_mask(self, attention_mask):
        return (1.0 - attention_mask[:, None, None, :].float()) * -10000.0

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        hidden = self.norm(self.word_embeddings(input_ids) + self.position_embeddings(positions))
        mask = self.get_extended_attention_mask(attention_mask)
        for layer in self.layer:
            hidden = self.norm(hidden + layer(hidden, mask))
        return hidden


class LMHeadLike(nn.Module):
    """Predicts the next token from a twin with is_decoder=True."""

    def __init__(self):
        super().__init__()
        self.bert = ModelLike(BertConfigLike(is_decoder=True))
        self.decoder = nn.Linear(48, 100)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.decoder(self.bert(input_ids, attention_mask))
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
