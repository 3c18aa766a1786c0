"""Child side of the protocol, in an engine's own interpreter; it needs the standard library only.

    child.py ADAPTER.py SETTINGS      settings are a JSON object

    parent                                                child
                                                          {"ready": facts}
    {"requests": [{"tokens": [..], "new_tokens": n,       {"seconds": s, "first_seconds": f,
                   "at": seconds}]}                        "input_tokens": i, "output_tokens": o,
                                                           "ttft": [..], "tpot": [..]}
    end of input                                          exits

Each line has one JSON object. Between lines the child sleeps in a read. Output of libraries goes to standard error. An
adapter has one function, `start(settings) -> (serve, facts)`; `serve(requests)` runs all of them, each from its time
`at` on (see `arrivals`), and returns the outcome. A function `close` among the facts is called at the end and not sent.
"""

import importlib.util
import json
import os
import sys


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # modules of adapters, which a safe path excludes
    spec = importlib.util.spec_from_file_location("adapter", sys.argv[1])
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)

    def answer(values) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    serve, facts = adapter.start(json.loads(sys.argv[2]))
    close = facts.pop("close", lambda: None)
    try:
        answer({"ready": facts})
        for line in sys.stdin:
            answer(serve(json.loads(line)["requests"]))
    finally:
        close()
    sys.stderr.flush()
    os._exit(0)  # the exit of an engine may take seconds and fail


if __name__ == "__main__":
    main()
