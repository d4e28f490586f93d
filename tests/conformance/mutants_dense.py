"""Faulty backends: embedding, norms, quantisation, linears, hyper-connections."""

from __future__ import annotations

import torch
from mutants import mutant

from deepinfer_backends.cpu_ref import hyper, quant
from deepinfer_backends.cpu_ref.kernels import ReferenceKernels
from deepinfer_backends.cpu_ref.linear import LinearWeight, matmul
from deepinfer_core.backend.formats import Numerics
from deepinfer_core.backend.types import QuantTensor

# ------------------------------------------------------------------ embedding, norms, quantisation, linears


@mutant("embed")
class LastIdIsTheOneBefore(ReferenceKernels):
    def embed(self, ids, table):
        return super().embed(ids.clamp_max(len(table) - 2), table)


@mutant("rms_norm")
class EpsilonForgotten(ReferenceKernels):
    def rms_norm(self, x, weight, eps):
        return super().rms_norm(x, weight, 1e-20)


@mutant("rms_norm")
class NormRoundedBeforeTheWeight(ReferenceKernels):
    def rms_norm(self, x, weight, eps):
        f = x.float()
        return self._round(self._round(f * (f * f).mean(-1, keepdim=True).add(eps).rsqrt()).float() * weight.float())


@mutant("rms_norm")
class StridedRowsReadAsContiguous(ReferenceKernels):
    def rms_norm(self, x, weight, eps):
        return super().rms_norm(torch.as_strided(x, x.shape, (x.shape[1], 1)), weight, eps)


@mutant("quantize")
class ScaleRoundedDown(ReferenceKernels):
    def quantize(self, x):
        if self.numerics is Numerics.IDEAL:
            return x
        _, scale = quant.fp8_blocks(x.float())
        scale = scale / 2
        blocks = (x.float().unflatten(-1, (-1, 32)) / scale).clamp(-448, 448)
        return (blocks.to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@mutant("quantize")
class NoAmaxFloor(ReferenceKernels):
    def quantize(self, x):
        if self.numerics is Numerics.IDEAL:
            return x
        blocks = x.float().unflatten(-1, (-1, 32))
        scale = quant.power_of_two_at_least((blocks.abs().amax(-1, keepdim=True) / 448).clamp_min(2.0**-100))
        return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@mutant("quantize")
class TiesAwayFromZero(ReferenceKernels):
    def quantize(self, x):
        if self.numerics is Numerics.IDEAL:
            return x
        q, scale = quant.fp8_blocks(x.float())
        return ((q * (1 + 2.0**-12)).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


@mutant("rms_norm_quantize")
class FusedNormQuantisesUnroundedRows(ReferenceKernels):
    def rms_norm_quantize(self, x, weight, eps):
        return self.quantize(x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt())


@mutant("linear")
class AccumulatorRounded(ReferenceKernels):
    def linear(self, x, weight, out_dtype=None):
        return super().linear(x, weight, out_dtype).bfloat16().to(out_dtype or self._dtype)


@mutant("linear")
class LastRowNotWritten(ReferenceKernels):
    def linear(self, x, weight, out_dtype=None):
        full = super().linear(x, weight, out_dtype)
        out = torch.empty_like(full)
        out[:-1] = full[:-1]
        return out


@mutant("linear")
class InputScaledInPlace(ReferenceKernels):
    def linear(self, x, weight, out_dtype=None):
        y = super().linear(x, weight, out_dtype)
        x.mul_(1.5)
        return y


@mutant("quantized_linear")
class LastTileSkipped(ReferenceKernels):
    def quantized_linear(self, x, weight):
        y = super().quantized_linear(x, weight)
        y[128:] = 0
        return y


@mutant("prepare_linear")
class FirstPartsScalesForAll(ReferenceKernels):
    def prepare_linear(self, parts):
        if parts[0].scale is None or len(parts) == 1:
            return super().prepare_linear(parts)
        first = parts[0].scale
        again = [QuantTensor(p.weight, first[torch.arange(p.scale.shape[0]) % len(first)]) for p in parts]
        return super().prepare_linear(again)


@mutant("prepare_linear")
class ScaleBlocksTransposed(ReferenceKernels):
    def prepare_linear(self, parts):
        def turned(part):
            if part.scale is None or part.scale.dim() != 2 or part.weight.dtype != torch.float8_e4m3fn:
                return part
            return QuantTensor(part.weight, part.scale.view(torch.uint8).t().reshape(part.scale.shape).view(part.scale.dtype))

        return LinearWeight.of([turned(part) for part in parts])


# ------------------------------------------------------------------ hyper-connections


@mutant("hc_pre")
class SinkhornOneIterationShort(ReferenceKernels):
    def hc_pre(self, streams, pre, weights, norm_weight, constants):
        fewer = constants._replace(sinkhorn_iters=max(constants.sinkhorn_iters - 1, 1))
        return super().hc_pre(streams, pre, weights, norm_weight, fewer)


@mutant("hc_pre")
class CollapsedWithTheNewMix(ReferenceKernels):
    def hc_pre(self, streams, pre, weights, norm_weight, constants):
        out = super().hc_pre(streams, pre, weights, norm_weight, constants)
        x = self.rms_norm(self._collapse(streams.float(), out.pre), norm_weight, constants.norm_eps)
        return out._replace(x=x, quantized=self.quantize(x))


@mutant("hc_pre")
class PostNotDoubled(ReferenceKernels):
    def hc_pre(self, streams, pre, weights, norm_weight, constants):
        out = super().hc_pre(streams, pre, weights, norm_weight, constants)
        return out._replace(post=out.post / 2)


@mutant("hc_pre")
class NormOfTheFirstStreamOnly(ReferenceKernels):
    def hc_pre(self, streams, pre, weights, norm_weight, constants):
        out = super().hc_pre(streams, pre, weights, norm_weight, constants)
        m, f = streams.shape[1], streams.float()
        rstd = (f[:, 0].square().mean(-1, keepdim=True) + constants.norm_eps).rsqrt()
        mix = matmul(f.flatten(1), weights.fn)[:, :m] * rstd * weights.scale[0] + weights.base[:m]
        return out._replace(pre=hyper.sigmoid(mix) + constants.hc_eps)


@mutant("hc_pre")
class QuantisedBeforeTheNorm(ReferenceKernels):
    def hc_pre(self, streams, pre, weights, norm_weight, constants):
        out = super().hc_pre(streams, pre, weights, norm_weight, constants)
        return out._replace(quantized=self.quantize(self._collapse(streams.float(), pre)))


@mutant("hc_post")
class MixTransposed(ReferenceKernels):
    def hc_post(self, streams, y, post, comb):
        return super().hc_post(streams, y, post, comb.transpose(1, 2))


@mutant("hc_collapse")
class CollapseInBfloat16(ReferenceKernels):
    def hc_collapse(self, streams, pre):
        out = torch.zeros_like(streams[:, 0])
        for j in range(streams.shape[1]):
            out = (out + (pre[:, j, None] * streams[:, j].float()).to(streams.dtype)).bfloat16().to(streams.dtype)
        return out


@mutant("hc_collapse")
class FirstStreamReturnedAsItIs(ReferenceKernels):
    def hc_collapse(self, streams, pre):
        out = streams[:, 0]
        out.copy_(super().hc_collapse(streams, pre))
        return out


@mutant("stream_mean")
class MeanOfFourWhateverTheNumber(ReferenceKernels):
    def stream_mean(self, streams):
        return self._round(streams.float().sum(1) / 4)
