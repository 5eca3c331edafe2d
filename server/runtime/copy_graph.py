"""A graph that copies bytes, for devices whose memory Python can't reach.

Knows: a little of ONNX's file format. Does not know: what is copied.

Written here field by field: the server does without the onnx package, and a bundle needn't carry
what is the same for all models.
"""

IR_VERSION = 10
OPSET = 19  # CUDA has Identity for every type since long before
UINT8 = 2


def input_name(index: int) -> str:
    return f"from_{index}"


def output_name(index: int) -> str:
    return f"to_{index}"


def identity_graph(num_copies: int) -> bytes:
    """An ONNX model: each of its outputs is one of its inputs, as bytes of any number."""
    pairs = [(input_name(i).encode(), output_name(i).encode()) for i in range(num_copies)]
    nodes = (
        _field(1, source) + _field(2, target) + _field(4, b"Identity") for source, target in pairs
    )
    graph = b"".join(_field(1, node) for node in nodes) + _field(2, b"copies")
    graph += b"".join(_field(11, _bytes_named(source)) for source, _ in pairs)
    graph += b"".join(_field(12, _bytes_named(target)) for _, target in pairs)
    return _number(1, IR_VERSION) + _field(8, _number(2, OPSET)) + _field(7, graph)


def _bytes_named(name: bytes) -> bytes:
    """A ValueInfoProto: a row of as many bytes as there are."""
    any_number = _field(1, b"")
    tensor_type = _number(1, UINT8) + _field(2, any_number)
    return _field(1, name) + _field(2, _field(1, tensor_type))


def _field(tag: int, content: bytes) -> bytes:
    return _varint(tag << 3 | 2) + _varint(len(content)) + content


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Protobuf's way: seven bits a byte, the lowest first, the eighth says that more follow."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))
