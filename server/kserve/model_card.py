"""The input and output tensors of a model, as Triton's vLLM backend has them, described twice:
for KServe's ModelMetadata and for Triton's ModelConfig.

Knows: names and types of tensors. Does not know: what they become.
"""

from quill.protos import kserve_pb2 as kserve
from quill.server.kserve.tensors import Tensor

ALIAS = "quill"  # whatever is served, by a name that a script can be written with
VERSION = "1"
PLATFORM = "onnxruntime_quill"
BACKEND = "quill"


def _by_name(*tensors: Tensor) -> dict[str, Tensor]:
    return {each.name: each for each in tensors}


TEXT = "text_input"
INPUTS = _by_name(
    Tensor(TEXT, "BYTES"),
    Tensor("stream", "BOOL"),
    Tensor("sampling_parameters", "BYTES"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("return_finish_reason", "BOOL"),
    Tensor("return_cumulative_logprob", "BOOL"),
    Tensor("return_logprobs", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    # Ours, not the backend's: instead of text_input, and what comes back.
    Tensor("messages", "BYTES"),
    Tensor("input_ids", "INT32", -1),
    Tensor("return_token_ids", "BOOL"),
)
# All but num_input_tokens have an element for each sequence.
OUTPUTS = _by_name(
    Tensor("text_output", "BYTES", -1),
    Tensor("finish_reason", "BYTES", -1),
    Tensor("cumulative_logprob", "FP32", -1),
    Tensor("logprobs", "BYTES", -1),
    Tensor("num_input_tokens", "UINT32"),
    Tensor("num_output_tokens", "UINT32", -1),
    Tensor("token_ids", "BYTES", -1),
)
ON_DEMAND = {f"return_{name}": name for name in OUTPUTS if f"return_{name}" in INPUTS}

_TYPES = {
    "BYTES": kserve.TYPE_STRING,
    "BOOL": kserve.TYPE_BOOL,
    "INT32": kserve.TYPE_INT32,
    "UINT32": kserve.TYPE_UINT32,
    "FP32": kserve.TYPE_FP32,
}


def metadata(name: str) -> kserve.ModelMetadataResponse:
    response = kserve.ModelMetadataResponse(name=name, versions=[VERSION], platform=PLATFORM)
    for tensors, described in ((INPUTS, response.inputs), (OUTPUTS, response.outputs)):
        for each in tensors.values():
            described.add(name=each.name, datatype=each.datatype, shape=[each.length])
    return response


def config(name: str) -> kserve.ModelConfig:
    card = kserve.ModelConfig(
        name=name,
        platform=PLATFORM,
        backend=BACKEND,
        max_batch_size=0,
        model_transaction_policy=kserve.ModelTransactionPolicy(decoupled=True),
    )
    for each in INPUTS.values():
        card.input.add(
            name=each.name,
            data_type=_TYPES[each.datatype],
            dims=[each.length],
            optional=each.name != TEXT,
        )
    for each in OUTPUTS.values():
        card.output.add(name=each.name, data_type=_TYPES[each.datatype], dims=[each.length])
    return card
