"""Models behind HTTP: completions and chat in OpenAI's form, translations in LibreTranslate's, with their attention."""

from .limits import ServingLimits as ServingLimits
from .model_server import ModelServer as ModelServer
from .served_model import ServedModel as ServedModel

__all__ = ["ModelServer", "ServedModel", "ServingLimits"]
