"""Translation from German to English, trained with Lightning."""

import math

import lightning as L
import torch
from torch import nn


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 512):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class Translator(L.LightningModule):
    def __init__(self, src_vocab=200, tgt_vocab=200, d_model=64, nhead=4, layers=2, pad_id=0, lr=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.src_embed = nn.Embedding(src_vocab, d_model, padding_idx=pad_id)
        self.tgt_embed = nn.Embedding(tgt_vocab, d_model, padding_idx=pad_id)
        self.positions = PositionalEncoding(d_model)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=128, batch_first=True), layers, enable_nested_tensor=False
        )
        self.decoder = nn.TransformerDecoder(
            nn.TransformerDecoderLayer(d_model, nhead, dim_feedforward=128),
            layers,
        )
        self.generator = nn.Linear(d_model, tgt_vocab)
        self.criterion = nn.CrossEntropyLoss(ignore_index=pad_id)

    def encode(self, src):
        keep = src != self.hparams.pad_id
        x = self.positions(self.src_embed(src) * math.sqrt(self.hparams.d_model))
        return self.encoder(x, src_key_padding_mask=keep)

    def decode(self, tgt, memory):
        x = self.positions(self.tgt_embed(tgt) * math.sqrt(self.hparams.d_model))
        return self.generator(self.decoder(x, memory))

    def forward(self, src, tgt):
        return self.decode(tgt, self.encode(src))

    def training_step(self, batch, batch_idx):
        src, tgt = batch
        logits = self(src, tgt[:, :-1])
        loss = self.criterion(logits.flatten(0, 1), tgt[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        src, tgt = batch
        logits = self(src, tgt[:, :-1])
        self.log("val_loss", self.criterion(logits.flatten(0, 1), tgt[:, 1:].flatten()))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98), eps=1e-9)
