"""One conversation, a batch of them, and a template of the script's own."""

from vllm import LLM

llm = LLM(model="facebook/opt-125m")
params = llm.get_default_sampling_params()
params.max_tokens = 8
params.temperature = 0
conversation = [
    {"role": "system", "content": "You are a helpful assistant"},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hello! How can I assist you today?"},
    {"role": "user", "content": "What is decode bound by?"},
]
(one,) = llm.chat(conversation, params, use_tqdm=False)
several = llm.chat([conversation for _ in range(4)], sampling_params=params, use_tqdm=True)
assert {output.outputs[0].text for output in several} == {one.outputs[0].text}
template = "{% for message in messages %}{{ message.content }} {% endfor %}"
(other,) = llm.chat(conversation, params, chat_template=template)
assert other.prompt == " ".join(message["content"] for message in conversation) + " "
print(one.outputs[0].text)
