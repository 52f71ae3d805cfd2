"""Answers that hold a form: a choice, a regex, a schema, a grammar."""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"brand": {"enum": ["a", "b"]}, "fast": {"type": "boolean"}},
    "required": ["brand", "fast"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
"""


def answer(llm: LLM, prompt: str, form: StructuredOutputsParams) -> str:
    sampling_params = SamplingParams(max_tokens=60, temperature=0, structured_outputs=form)
    return llm.generate(prompt, sampling_params=sampling_params)[0].outputs[0].text


def main() -> None:
    llm = LLM(model="facebook/opt-125m", max_model_len=200)
    sentiment = answer(llm, "Classify: it is wonderful!", StructuredOutputsParams(choice=["Positive", "Negative"]))
    assert sentiment in ("Positive", "Negative"), sentiment
    address = answer(llm, "An e-mail address:", StructuredOutputsParams(regex=r"[a-c]{2}@[a-c]{2}\.com"))
    assert address.endswith(".com"), address
    car = json.loads(answer(llm, "A car as JSON:", StructuredOutputsParams(json=SCHEMA)))
    assert car.keys() == {"brand", "fast"}, car
    query = answer(llm, "An SQL query:", StructuredOutputsParams(grammar=GRAMMAR))
    assert query.startswith("SELECT col_"), query
    print("all forms held")


if __name__ == "__main__":
    main()
