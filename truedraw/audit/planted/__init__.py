"""A server that is wrong in a known way: the positive control of an audit, and its test bed.

Its model, its decoder and its HTTP are its own: nothing here uses the engine, so that it can be wrong in every way.
"""

from truedraw.audit.planted.faults import FAULTS, Fault
from truedraw.audit.planted.law import Planting, Shift, mean_tv, strength_for
from truedraw.audit.planted.model import Model, Settings
from truedraw.audit.planted.server import PlantedServer
from truedraw.audit.planted.troubles import Trouble
from truedraw.audit.planted.vocabulary import END, VOCAB, decode, encode

__all__ = [
    "END",
    "FAULTS",
    "VOCAB",
    "Fault",
    "Model",
    "PlantedServer",
    "Planting",
    "Settings",
    "Shift",
    "Trouble",
    "decode",
    "encode",
    "mean_tv",
    "strength_for",
]
