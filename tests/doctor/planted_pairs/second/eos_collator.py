from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


@dataclass
class ChatCollator:
    tokenizer: Any
    max_length: int = 1024

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        texts = [row["prompt"] + row["answer"] + self.tokenizer.eos_token for row in rows]
        batch = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        labels = batch["input_ids"].clone()
        labels[labels == self.tokenizer.pad_token_id] = -100
        batch["labels"] = labels
        return batch


def main(name: str, dataset) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    trainer = Trainer(
        model=model,
        args=TrainingArguments("out", per_device_train_batch_size=4, remove_unused_columns=False),
        train_dataset=dataset,
        data_collator=ChatCollator(tokenizer),
    )
    trainer.train()
