"""Figures of attention, for matplotlib: the extra `plots`, imported when the first figure is drawn."""

from regard.plots.alignment_plot import alignment as alignment
from regard.plots.figures import save as save
from regard.plots.head_grid import grid as grid
from regard.plots.heatmaps import difference as difference
from regard.plots.heatmaps import heatmap as heatmap
from regard.plots.heatmaps import profiles as profiles
from regard.plots.line_plot import lines as lines
from regard.plots.mask_plot import tiles as tiles
from regard.plots.pooling import Pooling as Pooling
from regard.plots.similarity_plot import similarity as similarity

__all__ = [
    "Pooling",
    "alignment",
    "difference",
    "grid",
    "heatmap",
    "lines",
    "profiles",
    "save",
    "similarity",
    "tiles",
]
