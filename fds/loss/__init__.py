"""The loss as a value: `Mean`, `functional`, `with_buffers`, `Layers` and its specs, recipes."""

from fds.loss.blocks import NAMES, Block, at_blocks, first_of, row_of_one_class
from fds.loss.chains import Structure, structure_of
from fds.loss.layers import Layers
from fds.loss.microbatch import (
    Found,
    LayerCall,
    LayerMap,
    Place,
    Setting,
    carried_buffers,
    compiled_with,
    draws,
    initial_buffers,
    is_compiled,
    layer_calls,
    modules_of,
    name,
    places_of,
    run,
)
from fds.loss.modes import Around, Mode, ModuleMap, current as current_mode, show
from fds.loss.module_copies import Root, check_no_originals
from fds.loss.modules import functional
from fds.loss.recipes import LayerSpec, Recipe, TiedLayerSpec, on_meta, recipe
from fds.loss.submodules import PATTERNS, Submodules, at_submodules, overlapping
from fds.loss.values import Buffered, Mean, Outcome, read, with_buffers

__all__ = [
    "NAMES",
    "PATTERNS",
    "Around",
    "Block",
    "Buffered",
    "Found",
    "LayerCall",
    "LayerMap",
    "LayerSpec",
    "Layers",
    "Mean",
    "Mode",
    "ModuleMap",
    "Outcome",
    "Place",
    "Recipe",
    "Root",
    "Setting",
    "Structure",
    "Submodules",
    "TiedLayerSpec",
    "at_blocks",
    "at_submodules",
    "carried_buffers",
    "check_no_originals",
    "compiled_with",
    "current_mode",
    "draws",
    "first_of",
    "functional",
    "initial_buffers",
    "is_compiled",
    "layer_calls",
    "modules_of",
    "name",
    "on_meta",
    "overlapping",
    "places_of",
    "read",
    "recipe",
    "row_of_one_class",
    "run",
    "show",
    "structure_of",
    "with_buffers",
]
