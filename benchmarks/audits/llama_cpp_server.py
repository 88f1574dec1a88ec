"""llama.cpp's own server, as xllamacpp has it built in.

python llama_cpp_server.py PORT MODEL.gguf [ngram-simple | ngram-map-k | DRAFT.gguf]
"""

import sys
import threading

import xllamacpp

KINDS = xllamacpp.common_speculative_type


def main() -> None:
    port, model, *drafter = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.n_parallel, params.n_ctx = 4, 4 * 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # two servers share the machine
    params.verbosity = 0
    for name in drafter:
        if name.endswith(".gguf"):
            params.speculative.draft.mparams.path = name
            params.speculative.types = [KINDS.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        else:
            params.speculative.types = [getattr(KINDS, f"COMMON_SPECULATIVE_TYPE_{name.upper().replace('-', '_')}")]
    server = xllamacpp.Server(params)
    print(f"xllamacpp {xllamacpp.__version__} at {server.listening_address}", flush=True)
    threading.Event().wait()


main()
