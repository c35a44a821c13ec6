"""How each field of our protos looks to envoy-data-plane; a program of its own.

``python -m tests.protos.wire_report`` prints one JSON object with, for each field, enum value and
method, what it is in our protos and what it is in theirs. It runs by itself because two generations
of one protocol do not belong into a process that tests anything else.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import envoy_data_plane.envoy.config.core.v3 as core
import envoy_data_plane.envoy.config.endpoint.v3 as endpoint
import envoy_data_plane.envoy.data.accesslog.v3 as access_log_data
import envoy_data_plane.envoy.extensions.filters.http.ext_proc.v3 as filter_config
import envoy_data_plane.envoy.service.accesslog.v3 as access_log
import envoy_data_plane.envoy.service.discovery.v3 as discovery
import envoy_data_plane.envoy.service.ext_proc.v3 as ext_proc
import envoy_data_plane.envoy.type.v3 as envoy_type
import envoy_data_plane.google.rpc as google_rpc
from betterproto2 import Casing
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from protos import access_log_pb2, core_pb2, discovery_pb2, endpoint_pb2, ext_proc_pb2

OURS = (core_pb2, ext_proc_pb2, access_log_pb2, discovery_pb2, endpoint_pb2)
MODULES = (ext_proc, core, endpoint, access_log, access_log_data, discovery, filter_config)

MOVED = {
    # our name: theirs, where a subset of several files put it elsewhere
    "RpcStatus": google_rpc.Status,
    "HttpStatus": envoy_type.HttpStatus,
    "Address": core.Address,
    "HeaderMutation": ext_proc.HeaderMutation,
    "ResponseStatus": ext_proc.CommonResponseResponseStatus,
    "HeaderAppendAction": core.HeaderValueOptionHeaderAppendAction,
    "BodySendMode": filter_config.ProcessingModeBodySendMode,
    "HeaderSendMode": filter_config.ProcessingModeHeaderSendMode,
    "HealthCheckConfig": endpoint.EndpointHealthCheckConfig,
    "HealthStatus": core.HealthStatus,
    "Identifier": access_log.StreamAccessLogsMessageIdentifier,
    "HTTPAccessLogEntries": access_log.StreamAccessLogsMessageHttpAccessLogEntries,
    "HTTPAccessLogEntry": access_log_data.HttpAccessLogEntry,
    "HTTPRequestProperties": access_log_data.HttpRequestProperties,
    "HTTPResponseProperties": access_log_data.HttpResponseProperties,
}

SERVICES = {
    "ExternalProcessor": ext_proc.ExternalProcessorBase,
    "AccessLogService": access_log.AccessLogServiceBase,
    "AggregatedDiscoveryService": discovery.AggregatedDiscoveryServiceBase,
}

ENUM_AS_NUMBER = {"envoy.config.core.v3.HttpStatus.code"}
"""Ours are plain numbers, theirs an enum: a varint on the wire, either way."""

TYPE_NAMES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}


def main() -> None:
    """Print the report."""
    report = dict(_report())
    json.dump(report, sys.stdout)


def messages() -> Iterator[Descriptor]:
    """Yield every message of our protos, nested ones too."""
    for module in OURS:
        yield from _nested(module.DESCRIPTOR.message_types_by_name.values())


def enums() -> Iterator[EnumDescriptor]:
    """Yield every enum of our protos."""
    for message in messages():
        yield from message.enum_types


def _nested(found: Any) -> Iterator[Descriptor]:
    for message in found:
        if not message.GetOptions().map_entry:
            yield message
            yield from _nested(message.nested_types)


def _report() -> Iterator[tuple[str, dict[str, Any]]]:
    for message in messages():
        theirs = _peer(message.name)
        for field in message.fields:
            yield field.full_name, _field(theirs, field)
    for enum in enums():
        theirs = _peer(enum.name)
        for value in enum.values:
            known = theirs.__members__.get(value.name)
            yield (
                f"{enum.full_name}.{value.name}",
                {"ours": value.number, "theirs": None if known is None else int(known)},
            )
    for module in OURS:
        for service in module.DESCRIPTOR.services_by_name.values():
            served = SERVICES[service.name]().__mapping__()
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                yield path, {"ours": path, "theirs": path if path in served else sorted(served)}


def _peer(name: str) -> Any:
    if name in MOVED:
        return MOVED[name]
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def _field(theirs: Any, field: FieldDescriptor) -> dict[str, Any]:
    found = {known.name: known for known in dataclasses.fields(theirs)}.get(field.name)
    if found is None:
        return {"ours": field.name, "theirs": sorted(f.name for f in dataclasses.fields(theirs))}
    meta = found.metadata["betterproto"]
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    kind = "map" if is_map else TYPE_NAMES[field.type]
    if field.full_name in ENUM_AS_NUMBER:
        kind = "enum"
    message = GetMessageClass(field.containing_type)()
    _fill(message, field)
    expected = MessageToDict(message, preserving_proto_field_name=True)

    def read() -> Any:
        return theirs.parse(message.SerializeToString()).to_dict(casing=Casing.SNAKE)

    def written() -> Any:
        back = type(message).FromString(bytes(theirs.from_dict(expected)))
        return MessageToDict(back, preserving_proto_field_name=True)

    return {
        "ours": {
            "number": field.number,
            "type": kind,
            "repeated": field.is_repeated and not is_map,
            "read": _comparable(expected),
            "written": _comparable(expected),
        },
        "theirs": {
            "number": meta.number,
            "type": meta.proto_type,
            "repeated": meta.repeated,
            "read": _comparable(_or_error(read)),
            "written": _comparable(_or_error(written)),
        },
    }


def _or_error(convert: Callable[[], Any]) -> Any:
    try:
        return convert()
    except Exception as error:  # noqa: BLE001 - a wrong type fails in one of many ways
        return repr(error)


def _comparable(value: Any) -> Any:
    """Put the one number that is an enum for them into one form."""
    if isinstance(value, dict):
        return {key: _comparable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    known = envoy_type.StatusCode.__members__.get(value) if isinstance(value, str) else None
    return value if known is None else int(known)


def _fill(message: Message, field: FieldDescriptor) -> None:
    """Set *field* of *message*, and all that is below it, to values that are not the defaults."""
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            _sample(getattr(message, field.name)["key"])
        elif field.is_repeated:
            for _ in range(2):
                _sample(getattr(message, field.name).add())
        else:
            _sample(getattr(message, field.name))
    elif field.is_repeated:
        getattr(message, field.name).extend([_scalar(field), _scalar(field)])
    else:
        setattr(message, field.name, _scalar(field))


def _sample(message: Message) -> None:
    name = message.DESCRIPTOR.full_name
    match name:
        case "google.protobuf.Struct":
            message.update({"key": "text", "list": [1.5, True, None]})  # type: ignore[attr-defined]
        case "google.protobuf.Any":
            message.Pack(core_pb2.Node(id="x"))  # type: ignore[attr-defined]
            message.type_url = "type.googleapis.com/envoy.config.core.v3.Node"  # type: ignore[attr-defined]
        case "google.protobuf.Duration" | "google.protobuf.Timestamp":
            message.FromMilliseconds(2500)  # type: ignore[attr-defined]
        case _:
            chosen = set()
            for field in message.DESCRIPTOR.fields:
                oneof = field.containing_oneof
                if oneof is None or oneof.name not in chosen:
                    chosen.add(None if oneof is None else oneof.name)
                    _fill(message, field)
            message.SetInParent()


def _scalar(field: FieldDescriptor) -> Any:
    if field.full_name in ENUM_AS_NUMBER:
        return 503
    if field.enum_type is not None:
        return max(value.number for value in field.enum_type.values if value.number < 5)
    return {
        FieldDescriptor.CPPTYPE_STRING: b"\x00\xff"
        if field.type == field.TYPE_BYTES
        else "t\u00e9xt",
        FieldDescriptor.CPPTYPE_BOOL: True,
    }.get(field.cpp_type, 77)


if __name__ == "__main__":
    main()
