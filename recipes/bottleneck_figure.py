"""The figure of docs/transformer.md: BLEU by the length of the source, with attention and with one vector.

    python recipes/bottleneck_figure.py comparisons/bottleneck/results.json FILE.svg

Lines and letters are grey or of middle lightness, so that they read on light and on dark pages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

GREY = "#808080"
COLOURS = {"attention": "#3b82c4", "one vector": "#d9822b"}


def main() -> None:
    """Draw the results of `regard compare recipes/comparisons/bottleneck.yaml`."""
    results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    names = results["lengths"]
    style = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    with plt.rc_context({**style, "font.size": 11, "svg.hashsalt": "regard", "svg.fonttype": "none"}):
        figure, panel = plt.subplots(figsize=(6.0, 3.0), layout="constrained")
        for variant in results["variants"]:
            name = variant["name"]
            panel.plot(names, variant["by_length"], "o-", color=COLOURS[name], lw=2)
            panel.annotate(name, (0.4, variant["by_length"][0]), color=COLOURS[name])
        panel.set_ylim(0, None)
        panel.set_xlabel("tokens of the source")
        panel.set_ylabel("BLEU")
        panel.spines[["top", "right"]].set_visible(False)
        figure.savefig(Path(sys.argv[2]), transparent=True, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
