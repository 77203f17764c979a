"""Attention step by step: the tables of one head, worked examples, trained translators, and sheets to do by hand."""

from .answer_sheet import MarkedSheet as MarkedSheet
from .answer_sheet import mark_sheet as mark_sheet
from .layer_steps import layer_walkthrough as layer_walkthrough
from .layer_steps import linear_walkthrough as linear_walkthrough
from .marking import Mark as Mark
from .step_table import StepTable as StepTable
from .step_table import Walkthrough as Walkthrough
from .transformer_steps import transformer_walkthrough as transformer_walkthrough
from .translation_steps import translation_steps as translation_steps
from .walkthrough import walkthrough as walkthrough
from .what_if import WhatIf as WhatIf
from .worked_examples import EXAMPLES as EXAMPLES
from .worked_examples import worked_example as worked_example
from .worksheet import ClassSheets as ClassSheets
from .worksheet import Worksheet as Worksheet
from .worksheet import make_class_sheets as make_class_sheets
from .worksheet import make_worksheet as make_worksheet

__all__ = [
    "EXAMPLES",
    "ClassSheets",
    "Mark",
    "MarkedSheet",
    "StepTable",
    "Walkthrough",
    "WhatIf",
    "Worksheet",
    "layer_walkthrough",
    "linear_walkthrough",
    "make_class_sheets",
    "make_worksheet",
    "mark_sheet",
    "transformer_walkthrough",
    "translation_steps",
    "walkthrough",
    "worked_example",
]
