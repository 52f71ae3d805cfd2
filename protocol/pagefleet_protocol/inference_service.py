"""The InferenceService, v1alpha1: what a person writes to have a model served, and what they read back.

The one source of the resource's schema: `crds/` is generated from these types and `pagefleet up` reads files with them.
A field is here only when something acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from pagefleet_protocol.field_errors import InvalidDocument, field_errors

MAX_NAME_LENGTH = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?\Z")
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_SERVED_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}$"
_MODEL_URI = r"^(builtin://tiny|file:///[^\x00]+)$"
_QUANTITY = r"^[0-9]{1,15}(\.[0-9]{1,9})?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"
_SUFFIX: Mapping[str, float] = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 1024**power for power, letter in enumerate("KMGTP", start=1)
}
_OWN_FLAGS = {
    "--host": "the fleet chooses it",
    "--port": "the fleet chooses it",
    "--served-model-name": "set spec.model.name",
    "--dtype": "set spec.engine.dtype",
    "--max-model-len": "set spec.engine.maxModelLen",
    "--drain-timeout": "the fleet chooses it",
}


def _wrong(message: str) -> PydanticCustomError:
    # Braces would be read as a template's fields; the message is finished already.
    return PydanticCustomError("not_allowed", "{message}", {"message": message})


def _check_name(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH or not _NAME.match(name):
        raise _wrong(
            f"must be at most {MAX_NAME_LENGTH} lower-case letters, digits and '-', starting with a letter and not "
            "ending with '-' (names of pods are made from it)"
        )
    return name


def _check_namespace(namespace: str) -> str:
    if not _NAMESPACE.match(namespace):
        raise _wrong("must be at most 63 lower-case letters, digits and '-', with neither end a '-'")
    return namespace


def _check_served_name(name: str) -> str:
    if not re.match(_SERVED_NAME, name) or name.endswith("\n"):
        raise _wrong("must be at most 128 letters, digits and . _ / : -, starting with a letter or digit")
    return name


def _check_uri(uri: str) -> str:
    if re.match(_MODEL_URI, uri) and not uri.endswith("\n"):
        return uri
    now = "give builtin://tiny, or file:///absolute/path of a folder in Hugging Face layout"
    scheme, separator, _ = uri.partition("://")
    if separator and scheme in ("hf", "s3", "gs", "pvc", "oci", "http", "https"):
        raise _wrong(f"{scheme}:// is not supported yet: download the model, then {now}")
    raise _wrong(f"{now}, not {uri[:60]!a}")


def _check_args(args: tuple[str, ...]) -> tuple[str, ...]:
    for arg in args:
        flag = arg.partition("=")[0]
        # Command lines may shorten a flag, so its beginnings count as well.
        for own, remedy in _OWN_FLAGS.items():
            if len(flag) > 2 and own.startswith(flag):
                raise _wrong(f"{own} cannot be given here: {remedy}")
        if "\x00" in arg:
            raise _wrong("an argument holds a NUL character")
    return args


def _check_quantity(value: object) -> object:
    if isinstance(value, str | int) and not isinstance(value, bool) and re.match(_QUANTITY, str(value)):
        if quantity(str(value)) > 0:
            return str(value)
        raise _wrong("must be over 0")
    shown = value if isinstance(value, float) else 0.5
    raise _wrong(f'must be a Kubernetes quantity such as 2, "500m", "{shown}" or 8Gi (fractions in quotes)')


def quantity(text: str) -> float:
    """Return the number that a Kubernetes quantity (`2`, `500m`, `8Gi`) stands for."""
    number = text.rstrip("mkKMGTPi")
    return float(number) * _SUFFIX[text[len(number) :]]


Quantity = Annotated[
    str,
    BeforeValidator(_check_quantity),
    Field(
        json_schema_extra={
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "pattern": _QUANTITY,
            "x-kubernetes-int-or-string": True,
        }
    ),
]


class _Object(BaseModel):
    """Strict: no unknown field, no conversion between types. YAML's camelCase, Python's snake_case."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        extra="forbid",
        frozen=True,
        strict=True,
        serialize_by_alias=True,
        use_attribute_docstrings=True,
        validate_by_name=True,
        validate_by_alias=True,
    )


class Model(_Object):
    """Which model, and under which name clients ask for it."""

    uri: Annotated[str, AfterValidator(_check_uri), Field(json_schema_extra={"pattern": _MODEL_URI, "maxLength": 1024})]
    """builtin://tiny, or file:///absolute/path of a folder in Hugging Face layout."""
    name: (
        Annotated[str, AfterValidator(_check_served_name), Field(json_schema_extra={"pattern": _SERVED_NAME})] | None
    ) = None
    """What clients write as `model`; default: metadata.name."""


class Engine(_Object):
    """Settings of each engine. A change replaces the engines one by one."""

    args: Annotated[
        tuple[Annotated[str, Field(max_length=1024)], ...],
        Field(strict=False, max_length=64, json_schema_extra={"x-kubernetes-list-type": "atomic"}),
        AfterValidator(_check_args),
    ] = ()
    """More flags of `pagefleet serve`, one word each."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto: the checkpoint's, where the device computes in it."""
    max_model_len: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Longest prompt plus answer in tokens; default: what the model was made for."""


class Resources(_Object):
    """What each engine gets."""

    gpus: Annotated[int, Field(ge=0, le=1)] = 0
    """GPUs per engine, 0 or 1; 0 computes on the CPU."""
    cpu: Quantity | None = None
    """CPU cores per engine; default on this machine: an equal share."""
    memory: Quantity | None = None
    """Memory per engine; `pagefleet up` does not limit it."""


class Router(_Object):
    """The front door of the engines."""

    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    """Routers, each with an address of its own when run locally."""
    policy: Literal["prefix", "least-load"] = "prefix"
    """prefix: prefer the engine that has the prompt's beginning cached; least-load: the one with the least work."""


class InferenceServiceSpec(_Object):
    """What is wanted."""

    model: Model
    """Which model to serve."""
    engine: Engine = Engine()
    """Settings of each engine. A change replaces the engines one by one."""
    replicas: Annotated[int, Field(ge=0, le=256)] = 1
    """Engines that serve the model."""
    resources: Resources = Resources()
    """What each engine gets."""
    router: Router = Router()
    """The front door of the engines."""


class Condition(_Object):
    """One statement about the service, as Kubernetes has them."""

    type: Literal["Ready", "EngineReady", "RouterReady", "Progressing"]
    """Which statement."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """One word, for machines."""
    message: str
    """What is so, and what to do about it."""
    last_transition_time: Annotated[str, Field(json_schema_extra={"format": "date-time"})]
    """When `status` last changed, RFC 3339."""
    observed_generation: int
    """metadata.generation that this is about."""


class RoleStatus(_Object):
    """How many of one role's processes there are."""

    name: Literal["engine", "router"]
    """The role."""
    replicas: int
    """Wanted."""
    ready: int
    """Answering requests now."""
    updated: int
    """Running the wanted revision."""
    revision: str
    """Hash of the wanted settings."""


class InferenceServiceStatus(_Object):
    """What is so."""

    observed_generation: int
    """metadata.generation that this status is about."""
    model_name: str
    """What clients write as `model`."""
    url: str | None = None
    """Where clients send requests."""
    ready: str = ""
    """Engines ready of engines wanted, e.g. 1/2."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            strict=False,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    """Ready, EngineReady, RouterReady, Progressing."""
    roles: Annotated[
        tuple[RoleStatus, ...],
        Field(
            strict=False,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
        ),
    ] = ()
    """Counts of engines and routers."""


class ObjectMeta(_Object):
    """Name and labels, as every Kubernetes object has."""

    name: Annotated[str, AfterValidator(_check_name)]
    """The service's name."""
    namespace: Annotated[str, AfterValidator(_check_namespace)] = "default"
    """Where it lives in a cluster."""
    labels: dict[str, str] = {}
    """For selecting."""
    annotations: dict[str, str] = {}
    """Notes of other tools."""


class InferenceService(_Object):
    """A model to be served."""

    api_version: Literal["pagefleet.dev/v1alpha1"]
    """pagefleet.dev/v1alpha1"""
    kind: Literal["InferenceService"]
    """InferenceService"""
    metadata: ObjectMeta
    """Name and labels."""
    spec: InferenceServiceSpec
    """What is wanted."""
    status: InferenceServiceStatus | None = None
    """What is so; written by pagefleet."""

    @property
    def name(self) -> str:
        """The service's name."""
        return self.metadata.name

    @property
    def model_name(self) -> str:
        """What clients write as `model`."""
        return self.spec.model.name or self.metadata.name


def parse_inference_service(document: object) -> InferenceService:
    """Check a document made of dicts, lists and scalars.

    Raises:
        InvalidDocument: with every mistake in it, each with its path.
    """
    try:
        return InferenceService.model_validate(document, by_alias=True, by_name=False)
    except ValidationError as failure:
        raise InvalidDocument(field_errors(InferenceService, failure)) from failure
