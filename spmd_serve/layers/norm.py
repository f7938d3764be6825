"""RMSNorm, alone and fused with the residual add that comes before it."""

from __future__ import annotations

import torch
from torch import Tensor

from spmd_serve.distributed.collectives import Communicator
from spmd_serve.distributed.partition import Partition
from spmd_serve.kernels.norm import add_rms_norm_, rms_norm


class RMSNorm:
    """x / rms(x) * (offset + weight). `weight` is loaded as in the checkpoint; Gemma's offset is 1."""

    def __init__(self, size: int, *, eps: float, offset: float, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.zeros(size, dtype=dtype, device=device)
        self.eps = eps
        self.offset = offset
        self._scale: Tensor | None = None

    @property
    def scale(self) -> Tensor:
        """offset + weight, made once after loading.

        A sum near 1 has fewer digits in 16 bits than the weight had (a quarter more error in a Gemma's logits), so a GPU,
        whose kernels take any type, gets it in float32.
        """
        if self._scale is None:
            weight = self.weight.float() if self.weight.is_cuda and self.offset != 0.0 else self.weight
            self._scale = weight if self.offset == 0.0 else weight + self.offset
        return self._scale

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size] -> same shape and dtype; the mean square is taken in float32."""
        return rms_norm(x, self.scale, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), the sum in place of `residual`; both [tokens, size]."""
        return add_rms_norm_(x, residual, self.scale, self.eps)


class HeadsNorm:
    """RMSNorm of Q over all query heads together, and of K over all KV heads (OLMo 2), whose heads lie on many ranks."""

    def __init__(
        self,
        partition: Partition,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        comm: Communicator,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._sizes = [len(partition.q_heads) * head_dim, len(partition.kv_heads) * head_dim]
        self._totals = torch.tensor(
            [num_q_heads * head_dim, num_kv_heads * head_dim], dtype=torch.float32, device=device
        )
        group = num_q_heads // num_kv_heads
        # A KV head that several ranks hold is counted by the first of them.
        self._counts_k = bool(partition.kv_heads) and partition.q_heads.start == partition.kv_heads.start * group
        self._eps = eps
        self._comm = comm
        self.q_weight = torch.zeros(self._sizes[0], dtype=dtype, device=device)
        self.k_weight = torch.zeros(self._sizes[1], dtype=dtype, device=device)

    def __call__(self, qkv: Tensor) -> Tensor:
        """qkv: this rank's projection, [tokens, q | k | v] -> the same with q and k normed. Collective."""
        q, k, v = torch.split(qkv, [*self._sizes, self._sizes[1]], dim=-1)
        k_sum = k.float().square().sum(dim=-1) * self._counts_k
        sums = self._comm.all_reduce(torch.stack((q.float().square().sum(dim=-1), k_sum), dim=-1))
        scales = torch.rsqrt(sums / self._totals + self._eps)
        q = (q.float() * scales[:, :1]).to(q.dtype) * self.q_weight
        k = (k.float() * scales[:, 1:]).to(k.dtype) * self.k_weight
        return torch.cat((q, k, v), dim=-1)
