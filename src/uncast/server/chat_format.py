"""Which formats of reasoning and tool calls a model uses: as its chat template shows, or as the operator says."""

from __future__ import annotations

from dataclasses import dataclass

from uncast.engine.tokenizer import TemplateError, Tokenizer
from uncast.server.chat_reader import ChatReader, ToolReader
from uncast.server.marks import ThinkingReader
from uncast.server.tool_formats import FORMATS, ToolFormat, Tools, format_of

REASONING = {"glm45": None, "deepseek_v3": None, "deepseek_r1": True}
"""Name -> whether a text that says nothing about it begins within the reasoning, as the first R1's does."""
TOOL_PARSERS = ("auto", "none", *FORMATS)
REASONING_PARSERS = ("auto", "none", *REASONING)


@dataclass(frozen=True)
class ChatFormat:
    """How one model's answers are read.

    Attributes:
        tools: None if its calls are not known.
        reasoning: one of `REASONING`, None if its answers have no reasoning.
    """

    tools: ToolFormat | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_parser: str = "auto", reasoning_parser: str = "auto") -> ChatFormat:
        """The format by name, or from the template; a model without a template has none."""
        try:
            template = tokenizer.template
        except TemplateError:
            template = ""
        tools = format_of(template) if tool_parser == "auto" else tool_parser
        reasoning = reasoning_parser
        if reasoning == "auto":
            reasoning = "glm45" if "</think>" in template else "none"
        return cls(FORMATS.get(tools or "none"), None if reasoning == "none" else reasoning)

    def begins_inside(self, prompt: str) -> bool | None:
        """Whether an answer to the rendered prompt begins within its reasoning; None if its first text decides."""
        end = prompt.rstrip()
        if end.endswith(ThinkingReader.BEGIN):
            return True
        if end.endswith(ThinkingReader.END):
            return False
        return REASONING.get(self.reasoning or "")

    def shown(self, tools: Tools | None) -> tuple[str, ...]:
        """Marks that must be in a text for it to be read."""
        thinking = (ThinkingReader.BEGIN, ThinkingReader.END) if self.reasoning else ()
        return (*thinking, *(self.tools.marks if tools and self.tools else ()))

    def reader(self, prompt: str, tools: Tools | None) -> ChatReader:
        """A reader of one choice; without tools nothing is read as a call."""
        thinking = ThinkingReader(self.begins_inside(prompt)) if self.reasoning else None
        return ChatReader(thinking, ToolReader(self.tools, tools) if tools and self.tools else None)
