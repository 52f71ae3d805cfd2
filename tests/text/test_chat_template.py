import time
import tracemalloc

import pytest
from pagefleet_text import chat_template
from pagefleet_text.chat_template import ChatTemplate
from pagefleet_text.errors import PromptRefused, TextDamaged

HELLO = [{"role": "user", "content": "hi"}]


def render(source: str, messages: list[dict[str, object]] | None = None, **variables: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages or HELLO, variables=variables)


def test_a_template_sees_messages_tokens_and_variables() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}{% if tools is none %}-{% endif %}"
    )
    assert render(source, mood="!") == "<s>[user]hi[assistant]!-"


def test_blocks_are_trimmed_as_transformers_does() -> None:
    source = "{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\nend"
    assert render(source) == "x\nend"


def test_loop_controls_and_generation_marks_work() -> None:
    marked = "{% generation %}{{ n }}{% endgeneration %}"
    source = "{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}" + marked + "{% endfor %}"
    assert render(source) == "01"


def test_tojson_keeps_text_readable() -> None:
    assert render("{{ value | tojson }}", value={"b": "grüße <x>", "a": 1}) == '{"b": "grüße <x>", "a": 1}'
    assert render("{{ value | tojson(indent=2) }}", value=[1]) == "[\n  1\n]"


def test_a_template_knows_the_date() -> None:
    before = time.localtime().tm_year
    assert before <= int(render("{{ strftime_now('%Y') }}")) <= time.localtime().tm_year


def test_a_template_s_own_refusal_is_the_client_s_error() -> None:
    with pytest.raises(PromptRefused, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must\nalternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content + 5 }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages[0]['no'].upper() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_stumbles_is_the_client_s_error(source: str) -> None:
    with pytest.raises(PromptRefused):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages | attr('__class__')).__base__ }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(PromptRefused):
        render(source)


def test_output_is_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(PromptRefused, match="too long"):
        render("{% for n in range(99999) %}xxxxxxxxxx{% endfor %}")


def test_a_huge_range_is_refused() -> None:
    with pytest.raises(PromptRefused):
        render("{% for n in range(999999999) %}{% endfor %}")


def test_rendering_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", -1.0)
    with pytest.raises(PromptRefused, match="too long"):
        render("x")


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_rendering_ends_at_its_deadline_without_a_word_written(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", 0.05)
    with pytest.raises(PromptRefused, match="too long"):
        render(source)


def test_a_damaged_template_names_its_line() -> None:
    with pytest.raises(TextDamaged, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


GREEDY = [
    "{{ ('a' * 200000000)|length }}",
    "{{ ('a' * 100000 * 100000)|length }}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "{% set ns = namespace(all=[]) %}{% for i in range(9999) %}"
    "{% set ns.all = ns.all + ['a' * 1000000] %}{% endfor %}{{ ns.all|length }}",
    "{{ ('%200000000d' % 1)|length }}",
    "{{ ('%*d' % (200000000, 1))|length }}",
    "{{ '{:200000000}'.format(1)|length }}",
    "{{ '{:{}}'.format(1, 200000000)|length }}",
    "{{ ('%-200000000s'|format('a'))|length }}",
    "{{ ('a'.center(200000000))|length }}",
    "{{ ('a'|center(200000000))|length }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 100)|length }}",
    "{{ (('a' * 1000000)|replace('a', 'b' * 100))|length }}",
    "{{ ('a' * 1000000).translate({97: 'b' * 100})|length }}",
    "{{ ('\t' * 1000).expandtabs(1000000)|length }}",
    "{{ ('\n' * 10000)|indent(10000)|length }}",
    "{{ ([0] * 50000000)|length }}",
    "{{ ([1, 2]|tojson(indent=10000000))|length }}",
    "{{ ('a' * 100000)|list|join('b' * 1000)|length }}",
    "{{ messages|map(attribute='role')|join('b' * 1000000 * 17)|length }}",
    "{{ ('b' * 100000).join(('a' * 1000)|list)|length }}",
    "{{ [1]|batch(50000000, 0)|list|length }}",
    "{{ 2 ** 10000000 }}",
    "{{ lipsum(1000000) }}",
]


@pytest.mark.parametrize("source", GREEDY)
def test_a_template_that_would_make_too_much_is_stopped_before(source: str) -> None:
    template = ChatTemplate(source, {})
    tracemalloc.start()
    try:
        with pytest.raises(PromptRefused):
            template.render([{"role": "user", "content": "x"}])
        assert tracemalloc.get_traced_memory()[1] < 700 * 2**20
    finally:
        tracemalloc.stop()


def test_what_sensible_templates_make_is_left_alone() -> None:
    source = (
        "{% set ns = namespace(s='') %}{% for m in messages %}"
        "{% set ns.s = ns.s ~ m.role + ': ' + m.content ~ 1 %}{% endfor %}{{ ns.s|replace('a', 'b')|trim }}"
        " {{ '-' * 3 }}"
        " {{ '%s of %d' % ('x', 2) }} {{ '{:>3}'.format(7) }} {{ 7 % 3 }} {{ [1, 2]|join(', ') }}"
        " {{ messages|map(attribute='role')|join('+') }} {{ [1]|tojson(indent=2)|length }} {{ 2 ** 8 }}"
    )
    text = ChatTemplate(source, {}).render([{"role": "user", "content": "a"}, {"role": "tool", "content": "c"}])
    assert text == "user: b1tool: c1 --- x of 2   7 1 1, 2 user+tool 7 256"
