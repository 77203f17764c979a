"""Pictures of attention; they need the extra `plots`, which is loaded when the first one is drawn."""

from regard.plots.drawing import heatmap as heatmap
from regard.plots.pairs import tiles as tiles
