"""Kernels for four-bit weights, read from lines that engines really wrote."""

import pytest

from blockdraft.fp4_kernels import is_fp4_fallback, read_fp4_kernel, read_fp4_kernels

HEAD = "(EngineCore pid=108) INFO 04-14 12:41:13 [__init__.py:1240] "
MARLIN = (
    "(EngineCore pid=108) WARNING 04-14 12:41:13 [marlin.py:34] Your GPU does not have native support for "
    "FP4 computation but FP4 quantization is being used. Weight-only FP4 compression will be used leveraging "
    "the Marlin kernel. This may degrade performance for compute-heavy workloads."
)


@pytest.mark.parametrize(
    ("line", "kernel"),
    [
        (
            f"{HEAD}Using FlashInferCutlassNvFp4LinearKernel for NVFP4 GEMM",
            "linear: CUTLASS (FlashInferCutlassNvFp4LinearKernel)",
        ),
        (f"{HEAD}Using MarlinNvFp4LinearKernel for NVFP4 GEMM", "linear: Marlin (MarlinNvFp4LinearKernel)"),
        ("Using NvFp4LinearBackend.MARLIN for NVFP4 GEMM", "linear: Marlin (MARLIN)"),
        ("Using flashinfer-cutlass for NVFP4 GEMM", "linear: CUTLASS (flashinfer-cutlass)"),  # vLLM 0.12
        (
            f"{HEAD}Using 'FLASHINFER_CUTLASS' NvFp4 MoE backend out of potential backends: ['MARLIN']",
            "experts: CUTLASS (FLASHINFER_CUTLASS)",
        ),
        ("Using FlashInfer CuteDSL NVFP4 MoE backend", "experts: CuteDSL (FlashInfer CuteDSL)"),
        (f"{HEAD}Using FbgemmNvFp4LinearKernel for NVFP4 GEMM", "linear: FbgemmNvFp4LinearKernel"),
        (
            "ServerArgs(quantization='modelopt_fp4', fp4_gemm_runner_backend='flashinfer_cutlass')",
            "linear: CUTLASS (flashinfer_cutlass)",
        ),
        ("ServerArgs(quantization='modelopt_fp4', fp4_gemm_runner_backend='auto')", None),
        ("ServerArgs(quantization=None, fp4_gemm_runner_backend='flashinfer_cutlass')", None),
        (f"{HEAD}Using MarlinLinearKernel for mixed-precision linear", None),
        (MARLIN, None),
    ],
)
def test_the_kernel_is_named(line, kernel):
    assert read_fp4_kernel(line) == kernel


def test_each_kernel_is_named_once_and_the_fallback_recognised():
    lines = ["Using 'MARLIN' NvFp4 MoE backend", "x", "Using 'MARLIN' NvFp4 MoE backend"]
    assert read_fp4_kernels(lines) == ("experts: Marlin (MARLIN)",)
    assert is_fp4_fallback(MARLIN)
    assert not is_fp4_fallback("Using MarlinNvFp4LinearKernel for NVFP4 GEMM")  # asked for
