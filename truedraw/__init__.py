"""truedraw: speculative decoding with exactly the law of the target.

Importing this package is cheap: no model library is loaded before a model is.
"""

from truedraw.drafters.chain import ChainDrafter
from truedraw.drafters.model import ModelDrafter
from truedraw.drafters.ngram import NGramDrafter
from truedraw.drafters.none import NoDrafter
from truedraw.drafters.random import RandomDrafter
from truedraw.engine import Engine, Request
from truedraw.errors import TruedrawError
from truedraw.policy import FixedLength
from truedraw.protocols import Constraint, Drafter, DraftRequest, LengthPolicy, ModelRunner, Tokenizer
from truedraw.registry import LoadOptions, Model
from truedraw.types import (
    DenseRows,
    PointMass,
    Proposal,
    Record,
    Result,
    SamplingParams,
    SparseRows,
    Stats,
    Step,
    Verdict,
)

__version__ = "0.1.0"

__all__ = [
    "ChainDrafter",
    "Constraint",
    "DenseRows",
    "DraftRequest",
    "Drafter",
    "Engine",
    "FixedLength",
    "LengthPolicy",
    "LoadOptions",
    "Model",
    "ModelDrafter",
    "ModelRunner",
    "NGramDrafter",
    "NoDrafter",
    "PointMass",
    "Proposal",
    "RandomDrafter",
    "Record",
    "Request",
    "Result",
    "SamplingParams",
    "SparseRows",
    "Stats",
    "Step",
    "Tokenizer",
    "TruedrawError",
    "Verdict",
]
