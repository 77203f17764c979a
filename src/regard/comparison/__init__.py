"""Comparisons of variants of one model: each trained with several seeds, with intervals and paired tests."""

from .comparison_report import ComparisonReport as ComparisonReport
from .recipe import Recipe as Recipe
from .recipe import load_recipe as load_recipe
from .variant_runs import compare as compare
from .variants import Variant as Variant
from .variants import make_variants as make_variants

__all__ = ["ComparisonReport", "Recipe", "Variant", "compare", "load_recipe", "make_variants"]
