"""`python rehearsing_engine.py FD`: the engine process of a server that rehearses on a CPU, as others do on a GPU."""

import sys
from functools import partial

from quantkit.runtime.engine.engine import Engine
from quantkit.runtime.server.engine_process.process import main
from quantkit.runtime.warm_up import Rehearsal, all_parts


def everything(engine: Engine) -> Rehearsal:
    return Rehearsal(engine, all_parts(engine))


if __name__ == "__main__":
    partial(main, left_to_rehearse=everything)(int(sys.argv[1]))
