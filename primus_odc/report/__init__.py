"""Records of a comparison and everything made from them: ``result.json``, the table, the page, and the logs of single runs. numpy only."""

from primus_odc.report.ladder import Ladder, LadderSplit, Part
from primus_odc.report.logs import LogHeader, StepLogWriter, StepRecord, compare_logs, read_step_log
from primus_odc.report.result import ArmPhases, ArmResult, ComparisonResult
from primus_odc.report.timeline import Span, SpanRecorder, Timeline, compute_table, make_timeline

__all__ = [
    "ArmPhases",
    "ArmResult",
    "ComparisonResult",
    "Ladder",
    "LadderSplit",
    "LogHeader",
    "Part",
    "Span",
    "SpanRecorder",
    "StepLogWriter",
    "StepRecord",
    "Timeline",
    "compare_logs",
    "compute_table",
    "make_timeline",
    "read_step_log",
]
