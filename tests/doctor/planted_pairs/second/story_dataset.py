import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM


class StoryTokens(Dataset):
    """Blocks of a fixed length from one long stream of tokens."""

    def __init__(self, stream: torch.Tensor, block: int):
        self.stream = stream
        self.block = block

    def __len__(self):
        return (len(self.stream) - 1) // self.block

    def __getitem__(self, index):
        start = index * self.block
        ids = self.stream[start : start + self.block]
        targets = self.stream[start + 1 : start + self.block + 1]
        return {"input_ids": ids, "labels": targets}


def train(stream, block=256, batch_size=16, lr=3e-4, device="cuda"):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=256, num_hidden_layers=4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    loader = DataLoader(StoryTokens(stream, block), batch_size=batch_size, shuffle=True)
    model.train()
    for batch in loader:
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model
