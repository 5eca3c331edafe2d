from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HealthQuestion(_message.Message):
    __slots__ = ("service",)
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    service: str
    def __init__(self, service: _Optional[str] = ...) -> None: ...

class HealthWord(_message.Message):
    __slots__ = ("status",)
    class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[HealthWord.Status]
        SERVING: _ClassVar[HealthWord.Status]
        NOT_SERVING: _ClassVar[HealthWord.Status]
        SERVICE_UNKNOWN: _ClassVar[HealthWord.Status]
    UNKNOWN: HealthWord.Status
    SERVING: HealthWord.Status
    NOT_SERVING: HealthWord.Status
    SERVICE_UNKNOWN: HealthWord.Status
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: HealthWord.Status
    def __init__(self, status: _Optional[_Union[HealthWord.Status, str]] = ...) -> None: ...
