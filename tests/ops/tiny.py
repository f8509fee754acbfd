"""A small recorder for the tests of `ops` and `ledgers`: one dispatch mode, real tensors, no phases.

It stands apart from `preflop.record` so that a fault there cannot hide one here.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preflop.tape.events import Call, Phase, Ref, Role, Signature, Storage, Tape, TensorMeta


def meta(t: torch.Tensor) -> TensorMeta:
    """How `t` lies in its storage; a sparse one has no strides, and in place of an offset what it stores."""
    if t.layout != torch.strided:
        return TensorMeta(tuple(t.shape), (), int(t._nnz()), str(t.dtype)[6:])
    return TensorMeta(tuple(t.shape), tuple(t.stride()), t.storage_offset(), str(t.dtype)[6:])


class TinyRecorder(TorchDispatchMode):
    """Records every operator call into `self.tape`."""

    def __init__(self) -> None:
        super().__init__()
        self.tape = Tape(None)
        self._keep: list[object] = []
        self._ids: dict[object, int] = {}
        self._signatures: dict[Signature, int] = {}

    def _storage(self, t: torch.Tensor) -> int:
        if t.layout != torch.strided:
            self._keep.append(t)
            key: object = id(t)
            size = t._nnz() * t.element_size()
        else:
            storage = t.untyped_storage()
            self._keep.append(t)
            key = storage._cdata
            size = storage.nbytes()
        if key not in self._ids:
            self._ids[key] = len(self.tape.storages)
            self.tape.storages.append(
                Storage(size, str(t.dtype)[6:], tuple(t.shape), 0, None, Role.TEMPORARY)
            )
        return self._ids[key]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        ins: list[torch.Tensor] = []

        def plain(x):
            if isinstance(x, torch.Tensor):
                ins.append(x)
                return Ref(len(ins) - 1)
            if isinstance(x, (list, tuple)):
                return tuple(plain(y) for y in x)
            if isinstance(x, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
                return str(x)
            return x

        a = tuple(plain(x) for x in args)
        kw = tuple((k, plain(v)) for k, v in kwargs.items())
        metas = tuple(meta(t) for t in ins)
        in_ids = tuple(self._storage(t) for t in ins)
        out = func(*args, **kwargs)
        outs: list[torch.Tensor] = []

        def collect(x):
            if isinstance(x, torch.Tensor):
                outs.append(x)
            elif isinstance(x, (list, tuple)):
                for y in x:
                    collect(y)

        collect(out)
        out_ids = tuple(self._storage(t) for t in outs)
        aliases = tuple(in_ids.index(i) if i in in_ids else None for i in out_ids)
        writes: list[int] = []
        schema = getattr(func, "_schema", None)
        if schema is not None:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is None or not argument.alias_info.is_write:
                    continue
                value = a[position] if position < len(a) else dict(kw).get(argument.name)
                refs = value if isinstance(value, tuple) else (value,)
                writes += [ref.index for ref in refs if isinstance(ref, Ref)]
        name = func._schema.name.replace("::", ".") if schema is not None else func.__name__
        overload = getattr(func, "_overloadname", "default")
        sig = Signature(name, overload, a, kw, metas, tuple(meta(t) for t in outs), aliases, tuple(writes))
        index = self._signatures.setdefault(sig, len(self.tape.signatures))
        if index == len(self.tape.signatures):
            self.tape.signatures.append(sig)
        self.tape.calls.append(
            Call(index, in_ids + out_ids, len(self.tape.calls) + 1, Phase.FORWARD, 0, 0, 0, 0)
        )
        return out


def record(fn, *args) -> Tape:
    """The calls of `fn(*args)`, as a tape of one step."""
    with TinyRecorder() as recorder:
        fn(*args)
    return recorder.tape
