"""Threads that share the pieces of a kernel's work.

A kernel is a C function `void kernel(int64_t *arguments, int64_t first, int64_t last)`; `Pool.run` calls it for pieces
of `range(count)` on all threads, the caller's among them, until every piece is done. Whoever is free takes the next
piece, so a core that is busy with something else gets fewer. Kernels follow each other within microseconds in a step of
a model, so a thread that finds nothing to do looks a few thousand times, then sleeps until it is woken.

One word says which job it is and which piece is next: `job << 32 | piece`. A thread takes a piece by exchanging the
word for the next one, which fails if anything has changed since it read what the job is: nobody works on a job that is
over. While a new job is written down, the word says that no piece of the last one is left: who saw the new one before
it has pieces would take it for done, and sit it out.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from llvmlite import ir

from quantkit.kernels.cpu.compiling import Body, callable_at, compiled
from quantkit.kernels.cpu.language import I32, I64, Code, Value

# Places in the pool's memory, in numbers of 8 bytes. What threads write often has a line of the cache for itself.
_WORD, _DONE, _SLEEPERS, _STOP, _KERNEL, _ARGUMENTS, _COUNT, _MUTEX, _CONDITION = 0, 8, 16, 17, 24, 25, 26, 32, 48
_SIZE = 64
_NOTHING_LEFT = (1 << 32) - 1
_MANY = 7  # a thread takes so many at once as 2 to this is contained in all of them, and one more
_LOOKS = 12_000  # before a thread sleeps: about 50 us


class Launch(NamedTuple):
    """One call of `Pool.run`."""

    kernel: int
    arguments: ctypes.Array[ctypes.c_int64]
    pieces: int


class Pool:
    """`threads` in all: the caller of `run` is one of them. One caller at a time."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._memory = (ctypes.c_int64 * _SIZE)()
        self._address = ctypes.addressof(self._memory)
        self._lock = threading.Lock()
        self._recorder, self._launches = 0, list[Launch]()
        names = ("run", "work", "stop", "replay")
        self._run, work, self._stop, self._replay = (callable_at(*_code(name)) for name in names)
        libc = ctypes.CDLL(None)
        libc.pthread_mutex_init(ctypes.c_void_p(self._address + 8 * _MUTEX), None)
        libc.pthread_cond_init(ctypes.c_void_p(self._address + 8 * _CONDITION), None)
        self._workers = [
            threading.Thread(target=work, args=(self._address,), name=f"cpu-kernels-{number}", daemon=True)
            for number in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()

    def run(self, kernel: int, arguments: Sequence[int], count: int) -> None:
        """All pieces from 0 to count. Nobody is woken for a single one."""
        numbers = (ctypes.c_int64 * len(arguments))(*arguments)
        if self._recorder == threading.get_ident():
            self._launches.append(Launch(kernel, numbers, count))
        if count == 1 or self.threads == 1:
            callable_at(kernel, 3)(ctypes.addressof(numbers), 0, count)
            return
        with self._lock:
            self._run(self._address, kernel, ctypes.addressof(numbers), count)

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """What this thread runs meanwhile is listed, too."""
        self._recorder, self._launches = threading.get_ident(), []
        try:
            yield self._launches
        finally:
            self._recorder = 0

    def replay(self, launches: int, count: int) -> None:
        """So many kernels one after the other, in one call: int64 [count, 3] of kernel, arguments and pieces."""
        with self._lock:
            self._replay(self._address, launches, count, self.threads)

    def close(self) -> None:
        self._stop(self._address)
        for worker in self._workers:
            worker.join()


@cache
def shared_pool() -> Pool:
    """One for the process, with as many threads as torch uses."""
    return Pool(torch.get_num_threads())


os.register_at_fork(after_in_child=shared_pool.cache_clear)  # threads stay with the parent


@cache
def _code(name: str) -> tuple[int, int]:
    bodies: dict[str, tuple[Body, int]] = {"run": (_run, 4), "work": (_work, 1), "stop": (_stop, 1)}
    bodies["replay"] = (_replay, 4)
    body, arguments = bodies[name]
    return compiled(name, arguments, body), arguments


def _run(code: Code, pool: Value, kernel: Value, arguments: Value, count: Value) -> None:
    last = _read(code, pool, _WORD)
    _write(code, pool, _WORD, last | _NOTHING_LEFT)
    _write(code, pool, _DONE, code.constant(I64, 0))
    for place, value in ((_KERNEL, kernel), (_ARGUMENTS, arguments), (_COUNT, count)):
        _write(code, pool, place, value)
    _write(code, pool, _WORD, ((last >> 32) + 1) << 32)
    with code.when(code.constant(I64, 0) < _read(code, pool, _SLEEPERS)):
        _wake(code, pool)
    _take_pieces(code, pool)
    looks = code.variable(code.constant(I64, 0))
    with code.repeat() as again:
        again(_read(code, pool, _DONE) < count)
        looks.set(looks.get() + 1)
        _pause(code)
        with code.when(code.constant(I64, _LOOKS) < looks.get()):  # a thread with a piece has no core
            code.call("sched_yield", I32)


def _replay(code: Code, pool: Value, launches: Value, count: Value, threads: Value) -> None:
    with code.loop(0, count) as number:
        kernel, arguments, pieces = (code.load(I64, launches, number * 3 + place) for place in range(3))
        alone = (pieces < 2) | (threads < 2)
        with code.when(alone):
            _call(code, kernel, arguments, code.constant(I64, 0), pieces)
        with code.when(alone.equals(0)):
            _run(code, pool, kernel, arguments, pieces)


def _work(code: Code, pool: Value) -> None:
    """Until the pool is closed."""
    seen = code.variable(code.constant(I64, 0))
    with code.repeat() as again:
        again(_read(code, pool, _STOP) < 1)
        looks = code.variable(code.constant(I64, 0))
        with code.repeat() as look:
            look((_job(code, pool) < seen.get() + 1) & (looks.get() < _LOOKS))
            looks.set(looks.get() + 1)
            _pause(code)
        with code.when(_job(code, pool) < seen.get() + 1):
            _sleep(code, pool, seen.get())
        seen.set(_job(code, pool))
        _take_pieces(code, pool)


def _stop(code: Code, pool: Value) -> None:
    _write(code, pool, _STOP, code.constant(I64, 1))
    _wake(code, pool)


def _take_pieces(code: Code, pool: Value) -> None:
    """Of whatever job there is, until none is left. Of very many several at once: threads that take them hold each
    other up for longer than a small one lasts."""
    with code.repeat() as again:
        word = _read(code, pool, _WORD)
        piece = word & _NOTHING_LEFT
        kernel, arguments, count = (_read(code, pool, place) for place in (_KERNEL, _ARGUMENTS, _COUNT))
        again(piece < count)
        left, several = count - piece, (count >> _MANY) + 1
        some = code.select(several < left, several, left)
        exchanged = code.builder.cmpxchg(
            _pointer(code, pool, _WORD), word.llvm, (word + some).llvm, "seq_cst", failordering="seq_cst"
        )
        taken = code.builder.extract_value(exchanged, 1)
        with code.builder.if_then(taken):
            _call(code, kernel, arguments, piece, piece + some)
            code.builder.atomic_rmw("add", _pointer(code, pool, _DONE), some.llvm, "seq_cst")


def _call(code: Code, kernel: Value, arguments: Value, first: Value, last: Value) -> None:
    type = ir.FunctionType(ir.VoidType(), [I64.llvm] * 3)
    function = code.builder.inttoptr(kernel.llvm, type.as_pointer())
    code.builder.call(function, [arguments.llvm, first.llvm, last.llvm])


def _sleep(code: Code, pool: Value, seen: Value) -> None:
    """Until there is another job than the last one seen, or none will come. Counted before looking again, and woken
    under the lock, so no call can be missed."""
    mutex, condition = pool + 8 * _MUTEX, pool + 8 * _CONDITION
    code.call("pthread_mutex_lock", I32, mutex)
    code.builder.atomic_rmw("add", _pointer(code, pool, _SLEEPERS), I64.constant(1), "seq_cst")
    with code.repeat() as again:
        again((_job(code, pool) < seen + 1) & (_read(code, pool, _STOP) < 1))
        code.call("pthread_cond_wait", I32, condition, mutex)
    code.builder.atomic_rmw("sub", _pointer(code, pool, _SLEEPERS), I64.constant(1), "seq_cst")
    code.call("pthread_mutex_unlock", I32, mutex)


def _wake(code: Code, pool: Value) -> None:
    code.call("pthread_mutex_lock", I32, pool + 8 * _MUTEX)
    code.call("pthread_cond_broadcast", I32, pool + 8 * _CONDITION)
    code.call("pthread_mutex_unlock", I32, pool + 8 * _MUTEX)


def _pause(code: Code) -> None:
    """Let the other thread of the same core run, where there is one."""
    if code.processor.is_arm:
        code.do("llvm.aarch64.hint", code.constant(I32, 1))
    else:
        code.do("llvm.x86.sse2.pause")


def _job(code: Code, pool: Value) -> Value:
    return _read(code, pool, _WORD) >> 32


def _pointer(code: Code, pool: Value, place: int) -> Any:
    return code.builder.inttoptr((pool + 8 * place).llvm, I64.llvm.as_pointer())


def _read(code: Code, pool: Value, place: int) -> Value:
    return Value(code, I64, code.builder.load_atomic(_pointer(code, pool, place), "seq_cst", 8, typ=I64.llvm))


def _write(code: Code, pool: Value, place: int, value: Value) -> None:
    code.builder.store_atomic(value.llvm, _pointer(code, pool, place), "seq_cst", 8)
