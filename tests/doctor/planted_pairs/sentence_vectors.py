"""Vectors of sentences from a pretrained encoder."""

import torch
from transformers import AutoModel, AutoTokenizer


class SentenceVectors:
    def __init__(self, name):
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModel.from_pretrained(name).eval()

    @torch.inference_mode()
    def __call__(self, sentences):
        batch = self.tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
        hidden = self.model(**batch).last_hidden_state
        vectors = hidden.mean(dim=1)
        return torch.nn.functional.normalize(vectors, dim=-1)
