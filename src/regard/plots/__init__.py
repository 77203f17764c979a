"""Pictures of attention; they need the extra `plots`, which is loaded when the first one is drawn."""

from regard.plots.cells import Cells as Cells
from regard.plots.drawing import difference as difference
from regard.plots.drawing import heatmap as heatmap
from regard.plots.linked import alignment as alignment
from regard.plots.pairs import tiles as tiles
from regard.plots.saving import save as save
from regard.plots.sides import profiles as profiles
from regard.plots.similar import similarity as similarity
from regard.plots.strands import lines as lines
from regard.plots.thumbnails import grid as grid
