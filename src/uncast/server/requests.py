"""Request bodies of the OpenAI API. Every field is checked: unknown names and values out of range are refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

MAX_CHOICES = 128
MAX_STOP_CHARS = 1000
MAX_TOKENS = 2**31 - 1
MAX_BIASES = 1024


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 3.0 is the integer 3."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"{len(value)} entries are more than the {MAX_BIASES} that are allowed")
    return value


WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE]
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
# One spelling of each id, so that a token cannot have two biases.
TokenKey = Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,8})$")]
Bias = Annotated[FiniteFloat, Field(ge=-100, le=100)]


Biases = Annotated[
    dict[TokenKey, Bias],
    Field(max_length=MAX_BIASES, json_schema_extra={"additionalProperties": False}),
    BeforeValidator(_few),
]


class Body(BaseModel):
    """Base of all bodies: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Body):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="send a last chunk without choices that holds the usage")
    include_obfuscation: bool | None = Field(None, description="accepted and without effect")


class StructuredOutputs(Body):
    """Extension: what the answer's text must be; one of the fields."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="true: any JSON object")
    regex: str | None = Field(None, description="an expression in the syntax of Rust's regex crate")
    choice: Annotated[list[StopText], Field(min_length=1, max_length=1000, fail_fast=True)] | None = None
    grammar: str | None = Field(None, description="a Lark grammar, as llguidance reads it")


class SamplingBody(Body):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="a name that /v1/models lists; the served model if left out")
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(None, description="new tokens at most")
    temperature: Annotated[FiniteFloat, Field(ge=0, le=2)] | None = Field(
        None, description="0 is greedy; default: the model's generation_config.json, else 1"
    )
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = Field(
        None, description="sample from the smallest set of tokens with this probability"
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="extension: sample from the k best tokens; 0 and -1 are off"
    )
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = Field(
        None, description="extension: drop tokens under this share of the best one's probability"
    )
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01, le=10)] | None = Field(
        None, description="extension: divides positive and multiplies negative logits of tokens seen so far"
    )
    ignore_eos: bool | None = Field(None, description="extension: go on after the model's end token")
    presence_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[FiniteFloat, Field(ge=-2, le=2)] | None = None
    logit_bias: Biases | None = Field(None, description="token id to a number that is added to its logit")
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        None, description="choices per prompt; default 1"
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=4, fail_fast=True)] | None = Field(
        None, description="up to 4 texts that end the answer; they are not part of it"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), WHOLE] | None = Field(
        None,
        description="the same seed and request give the same text, under --deterministic whatever runs beside it; "
        "otherwise other requests in the batch can change it by rounding",
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="extension: what the text must be")
    stream: bool | None = Field(None, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    user: str | None = Field(None, description="accepted and without effect")
    metadata: dict[str, Any] | None = Field(None, description="accepted and without effect")
    store: bool | None = Field(None, description="accepted and without effect")


class CompletionRequest(SamplingBody):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]
    ) = Field(description="a text, texts, token ids, or lists of token ids")
    logprobs: Annotated[int, Field(ge=0, le=5), WHOLE] | None = Field(
        None, description="log-probabilities of the chosen and of this many best tokens"
    )
    echo: bool | None = Field(None, description="begin the text with the prompt; not together with logprobs")


class TextPart(Body):
    """A text in a message's list of parts."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an earlier answer called."""

    name: str
    arguments: str = Field(description="the text of a JSON object")


class EarlierCall(Body):
    """A tool call of an earlier answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


Content = str | Annotated[list[TextPart], Field(fail_fast=True)]


class Message(Body):
    """A message to the model."""

    role: Literal["system", "developer", "user"]
    content: Content = Field(description="a text or text parts")
    name: str | None = Field(None, description="accepted; most chat templates do not use it")


class AssistantTurn(Body):
    """An earlier answer of the model."""

    role: Literal["assistant"]
    content: Content | None = Field(None, description="a text or text parts")
    name: str | None = Field(None, description="accepted; most chat templates do not use it")
    refusal: str | None = Field(None, description="accepted and without effect")
    reasoning_content: str | None = Field(None, description="extension: the reasoning before it, for the template")
    tool_calls: Annotated[list[EarlierCall], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None


class ToolResult(Body):
    """What a tool call gave."""

    role: Literal["tool"]
    content: Content = Field(description="a text or text parts")
    tool_call_id: str
    name: str | None = Field(None, description="accepted; most chat templates do not use it")


AnyMessage = Annotated[Message | AssistantTurn | ToolResult, Field(discriminator="role")]


class TextFormat(Body):
    """Plain text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A JSON schema with a name."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = Field(None, description="accepted and without effect")
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="accepted: a schema is always followed")


class JsonSchemaFormat(Body):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class FunctionTool(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="a JSON schema of an object")
    strict: bool | None = Field(None, description="accepted; see tool_choice")


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: FunctionTool


class ChosenFunction(Body):
    name: str


class ChosenTool(Body):
    """The tool that has to be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(SamplingBody):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[AnyMessage], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="new tokens at most; max_tokens is its older name"
    )
    logprobs: bool | None = Field(None, description="log-probabilities of the chosen tokens")
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = Field(
        None, description="and of this many best tokens; only with logprobs"
    )
    response_format: ResponseFormat | None = Field(None, description="what the answer's text must be")
    tools: Annotated[list[Tool], Field(max_length=MAX_CHOICES, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = Field(
        None, description="auto (default with tools): the model decides; required and a tool's name: by a grammar"
    )
    chat_template_kwargs: dict[str, str | bool | int | FiniteFloat] | None = Field(
        None, description="extension: variables for the model's chat template, such as enable_thinking"
    )
