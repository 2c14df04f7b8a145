"""The attention problem, the wrapper users call, the backend protocol and registry, and the float64 oracle."""

from uncast.attention.backend import Backend, Capability
from uncast.attention.plan import AttentionPlan
from uncast.attention.problem import Problem, ProblemError, ProblemSpec
from uncast.attention.select import Refused
from uncast.attention.wrapper import ClaimedCapabilityWarning, MLAPagedAttention

__all__ = [
    "AttentionPlan",
    "Backend",
    "Capability",
    "ClaimedCapabilityWarning",
    "MLAPagedAttention",
    "Problem",
    "ProblemError",
    "ProblemSpec",
    "Refused",
]
