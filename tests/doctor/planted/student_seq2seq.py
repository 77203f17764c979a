# Homework 4: machine translation with a Transformer
import torch
import torch.nn as nn
import math

class SelfAttention(nn.Module):
    def __init__(self, embed_size, heads):
        super(SelfAttention, self).__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads

        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask):
        N = query.shape[0]
        value_len, key_len, query_len = values.shape[1], keys.shape[1], query.shape[1]

        values = self.values(values).reshape(N, value_len, self.heads, self.head_dim)
        keys = self.keys(keys).reshape(N, key_len, self.heads, self.head_dim)
        queries = self.queries(query).reshape(N, query_len, self.heads, self.head_dim)

        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])
        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))

        attention = torch.softmax(energy / (self.embed_size ** (1/2)), dim=3)
        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, query_len, self.heads * self.head_dim)
        return self.fc_out(out)

class TransformerBlock(nn.Module):
    def __init__(self, embed_size, heads, dropout, forward_expansion):
        super(TransformerBlock, self).__init__()
        self.attention = SelfAttention(embed_size, heads)
        self.norm1 = nn.LayerNorm(embed_size)
        self.norm2 = nn.LayerNorm(embed_size)
        self.feed_forward = nn.Sequential(
            nn.Linear(embed_size, forward_expansion * embed_size),
            nn.ReLU(),
            nn.Linear(forward_expansion * embed_size, embed_size),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, value, key, query, mask):
        attention = self.attention(value, key, query, mask)
        x = self.dropout(self.norm1(attention + query))
        return self.dropout(self.norm2(self.feed_forward(x) + x))

class Encoder(nn.Module):
    def __init__(self, vocab, embed_size, layers, heads, dropout, max_length):
        super(Encoder, self).__init__()
        self.word = nn.Embedding(vocab, embed_size)
        self.position = nn.Embedding(max_length, embed_size)
        self.layers = nn.ModuleList([TransformerBlock(embed_size, heads, dropout, 4) for _ in range(layers)])

    def forward(self, x, mask):
        N, seq_length = x.shape
        positions = torch.arange(0, seq_length).expand(N, seq_length).to(x.device)
        out = self.word(x) + self.position(positions)
        for layer in self.layers:
            out = layer(out, out, out, mask)
        return out

class DecoderBlock(nn.Module):
    def __init__(self, embed_size, heads, dropout):
        super(DecoderBlock, self).__init__()
        self.attention = SelfAttention(embed_size, heads)
        self.norm = nn.LayerNorm(embed_size)
        self.block = TransformerBlock(embed_size, heads, dropout, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, enc_out, src_mask, trg_mask):
        query = self.dropout(self.norm(self.attention(x, x, x, trg_mask) + x))
        return self.block(enc_out, enc_out, query, trg_mask[..., -1:, :enc_out.shape[1]])

class Decoder(nn.Module):
    def __init__(self, vocab, embed_size, layers, heads, dropout, max_length):
        super(Decoder, self).__init__()
        self.word = nn.Embedding(vocab, embed_size)
        self.position = nn.Embedding(max_length, embed_size)
        self.layers = nn.ModuleList([DecoderBlock(embed_size, heads, dropout) for _ in range(layers)])
        self.fc_out = nn.Linear(embed_size, vocab)

    def forward(self, x, enc_out, src_mask, trg_mask):
        N, seq_length = x.shape
        positions = torch.arange(0, seq_length).expand(N, seq_length).to(x.device)
        x = self.word(x) + self.position(positions)
        for layer in self.layers:
            x = layer(x, enc_out, src_mask, trg_mask)
        return self.fc_out(x)

class Transformer(nn.Module):
    def __init__(self, src_vocab=50, trg_vocab=50, src_pad=0, embed_size=32, layers=2, heads=4, dropout=0.0, max_length=64):
        super(Transformer, self).__init__()
        self.encoder = Encoder(src_vocab, embed_size, layers, heads, dropout, max_length)
        self.decoder = Decoder(trg_vocab, embed_size, layers, heads, dropout, max_length)
        self.src_pad = src_pad

    def make_src_mask(self, src):
        return (src != self.src_pad).unsqueeze(1).unsqueeze(3)

    def make_trg_mask(self, trg):
        N, trg_len = trg.shape
        return torch.tril(torch.ones((trg_len, trg_len)), diagonal=1).expand(N, 1, trg_len, trg_len)

    def forward(self, src, trg):
        src_mask = self.make_src_mask(src)
        trg_mask = self.make_trg_mask(trg)
        return self.decoder(trg, self.encoder(src, src_mask), src_mask, trg_mask)
