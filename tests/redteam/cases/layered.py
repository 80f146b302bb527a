"""Blocks of the classes written beside this one in a stack, with the stream cut along the sequence, and over cp."""

from __future__ import annotations

from ..case import HOSTILE, call, case, ids
from . import dunders, functionals, namings, reckonings, schedules, transforms, tricks
from .streams import stacked

IDS = ids(2, 12)
PAD = {"sequence_padding": "pad"}
_BLOCKS = (
    dunders.OperatorsOfModules,
    dunders.CopiedShallowly,
    functionals.TopByFunction,
    functionals.FusedGateByHand,
    functionals.CheckpointedVariously,
    functionals.UnderOwnMode,
    namings.LettersOfPatterns,
    namings.GapsInNumbers,
    namings.SameNameDeeper,
    namings.OddShapesOfWeights,
    reckonings.PowersOfTwo,
    reckonings.SizesInTuple,
    reckonings.ClosedOverSizes,
    reckonings.LoopOverUnits,
    reckonings.SquareOfUnits,
    transforms.ComplexParts,
    transforms.BandsOfSpectrum,
    transforms.Cosines,
    transforms.SegmentsOfUnits,
    transforms.LowRankAndSparse,
    transforms.TriangleOfUnits,
    tricks.ManifoldMixup,
    tricks.MixedStatistics,
    tricks.CutUnits,
    tricks.LearnedSteps,
    tricks.BlocksOfScales,
    tricks.RowAndColumnScales,
    tricks.ReZeroAndScales,
    tricks.LipschitzLayers,
)
# what they keep from call to call
_KEEP = (schedules.DropsLaterLayers, schedules.ScopedScale, schedules.SettingsRestored, schedules.TableGrows)

for _block in (*_BLOCKS, *_KEEP):
    _build = stacked(_block)
    _build.__module__ = __name__
    _both = None if _block is reckonings.SizesInTuple else True
    case(call(IDS), sequence=_both, cp=2, allowed=HOSTILE, options=PAD)(_build)
