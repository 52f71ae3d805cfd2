"""The sampling kernels at the sizes of serving, which only a GPU gets through, against the twins on the CPU."""

import numpy as np
import pytest
import torch
from pagefleet_kernels.sampling import sample_tokens
from pagefleet_kernels.sampling_record import TokenRecord
from pagefleet_kernels.sampling_rows import RowParameters, SamplingRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def sample(logits_RV: torch.Tensor, parameters: tuple[float, int, float, float], device: torch.device) -> torch.Tensor:
    temperature, top_k, top_p, log_min_p = parameters
    num_rows = len(logits_RV)
    rows = SamplingRows(
        RowParameters(
            seed=np.arange(num_rows, dtype=np.uint64),
            prompt_len=np.zeros(num_rows, dtype=np.int64),
            temperature=np.full(num_rows, temperature),
            top_k=np.full(num_rows, top_k),
            top_p=np.full(num_rows, top_p),
            log_min_p=np.full(num_rows, log_min_p, dtype=np.float32),
        ),
        device,
    )
    lens_R = torch.full((num_rows,), 5, dtype=torch.int32, device=device)
    tokens_SL = torch.zeros((num_rows, 8), dtype=torch.int32, device=device)
    token_R = sample_tokens(
        logits_RV.to(device, copy=True), rows, lens_R, TokenRecord(tokens_SL, torch.arange(num_rows, device=device))
    )
    assert torch.equal(tokens_SL[:, 5], token_R)
    return token_R.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [32_000, 151_936, 262_144])
@pytest.mark.parametrize(
    "parameters",
    [
        (0.0, 0, 1.0, -np.inf),
        (1.0, 0, 1.0, -np.inf),
        (0.8, 50, 1.0, -np.inf),
        (1.0, 0, 0.9, -np.inf),
        (1.2, 1_000, 0.95, -4.0),
        (1.0, 0, 1.0, -3.0),
        (2.0, 0, 0.999, -np.inf),
    ],
)
def test_tokens_are_those_of_the_twin(
    parameters: tuple[float, int, float, float], vocab_size: int, dtype: torch.dtype
) -> None:
    logits_RV = (torch.randn(128, vocab_size, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    by_kernel = sample(logits_RV, parameters, torch.device("cuda"))
    by_twin = sample(logits_RV, parameters, torch.device("cpu"))
    # two scores may lie within what logarithms and sums of another order differ by
    assert int((by_kernel != by_twin).sum()) <= (0 if parameters[0] == 0.0 else 2)
    assert torch.equal(by_kernel[:7], sample(logits_RV[:7], parameters, torch.device("cuda")))
