"""What the three rooms share: typed recipes, clear errors, progress on a terminal or in a log."""

from configs.console import Progress, say
from configs.errors import UserError, run_cli
from configs.files import make_folder
from configs.loading import load_profile, load_recipe
from configs.schema import Recipe

__all__ = [
    "Progress",
    "Recipe",
    "UserError",
    "load_profile",
    "load_recipe",
    "make_folder",
    "run_cli",
    "say",
]
