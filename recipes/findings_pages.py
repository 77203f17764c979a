"""Pages of the doctor about a small language model with mistakes, and pictures of them for docs/doctor.md.

    python recipes/findings_pages.py --folder pages --pictures docs/pictures

It writes the model to `folder`, then what `regard doctor --html` and `regard examine --html` write about it. Pictures
need Chromium.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from regard.doctor import diagnose, diagnosis_page, examination_page, examine
from regard.doctor.model_source import load_model, random_batch

MODEL = '''"""A language model of one layer, as one writes it in an evening."""

import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(2)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, d))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=500, dim=64):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.attention = SelfAttention(dim)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head(x + self.attention(x))
'''


def write_pages(folder: Path) -> list[Path]:
    """The model, and the two pages about it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "language_model.py").write_text(MODEL)
    name = "language_model.py"
    code, model = folder / "doctor-page.html", folder / "examine-page.html"
    diagnosis_page(diagnose(MODEL, path=name), sources={name: MODEL}, scope="1 file").save(code)
    torch.manual_seed(0)
    loaded = load_model(f"{folder / name}:LanguageModel")
    examination_page(examine(loaded, random_batch(loaded, tokens=48), causal=True, maps=True)).save(model)
    return [code, model]


def take_picture(page: Path, picture: Path, height: int) -> None:
    """A picture of the upper part of a page, by Chromium without a window."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("pictures need Chromium, and it is not installed")
    with tempfile.TemporaryDirectory() as profile:
        command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={profile}"]
        address = page.resolve().as_uri()
        subprocess.run([*command, f"--window-size=1240,{height}", f"--screenshot={picture}", address], check=True)


def main() -> None:
    """Pages, and pictures where they are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the model and the pages go")
    parser.add_argument("--pictures", type=Path, help="where pictures of the pages go")
    options = parser.parse_args()
    for page, height in zip(write_pages(options.folder), (760, 900), strict=True):
        if options.pictures is not None:
            take_picture(page, options.pictures.resolve() / f"{page.stem}.png", height)


if __name__ == "__main__":
    main()
