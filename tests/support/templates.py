"""Chat templates in the styles of six families, short, but with what each does to a conversation."""

import json
from collections.abc import Sequence
from typing import Any

from bpe import END_OF_TEXT, train_bpe
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

# Earlier thinking is dropped, the last answer has at least empty thinking, results of tools share a user's turn.
QWEN3 = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set text = m.content or '' %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.user and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.lstrip('\\n') }}
        {%- else %}
            {{- text }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function or call %}
            {{- '\\n' if text or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
            {{- f.arguments if f.arguments is string else f.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# The generation prompt opens the thinking; calls are written as XML.
QWEN35 = """
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable %}{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if tools %}
        {{- '# Tools\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
        {{- '\\n</tools>\\n' }}
    {%- endif %}
    {%- if messages[0].role == 'system' %}{{- text_of(messages[0].content) }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- if last.user < 0 %}{{- raise_exception('No user query found in messages.') }}{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('System message must be at the beginning.') }}{%- endif %}
    {%- elif m.role == 'user' %}
        {{- '<|im_start|>user\\n' + text_of(m.content) + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set text = text_of(m.content) | trim %}
        {%- set thought = (m.reasoning_content or '') | trim %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] | trim %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.user %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function or call %}
            {{- ('\\n\\n' if text and loop.first else '\\n' if not loop.first else '') }}
            {{- '<tool_call>\\n<function=' + f.name + '>\\n' }}
            {%- for name, value in f.arguments | items %}
                {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.previtem and loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + text_of(m.content) + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking else '<think>\\n' }}
{%- endif %}"""

# Thinking, calls and answers are messages of channels; thinking before an answer is dropped later; the last one ends
# in <|return|>, earlier ones in <|end|>.
HARMONY = """
{{- '<|start|>system<|message|>You are a model.\\nReasoning: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- set rest = namespace(messages=messages, developer='', call='') %}
{%- if messages[0].role in ('system', 'developer') %}
    {%- set rest.developer = messages[0].content %}{%- set rest.messages = messages[1:] %}
{%- endif %}
{%- if rest.developer or tools %}
    {{- '<|start|>developer<|message|>' }}
    {%- if rest.developer %}{{- '# Instructions\\n\\n' + rest.developer + '\\n\\n' }}{%- endif %}
    {%- if tools %}
        {{- '# Tools\\n\\nnamespace functions {\\n' }}
        {%- for tool in tools %}
            {{- '// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: {' }}
            {%- for name, value in (tool.function.parameters.properties or {}) | items %}
                {{- name + ': ' + value.type + ', ' }}
            {%- endfor %}
            {{- '}) => any;\\n' }}
        {%- endfor %}
        {{- '}' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- for m in rest.messages %}
    {%- if m.role == 'assistant' %}
        {%- set later = namespace(answer=false) %}
        {%- for n in rest.messages[loop.index:] %}
            {%- if n.role == 'assistant' and not n.tool_calls %}{%- set later.answer = true %}{%- endif %}
        {%- endfor %}
        {%- if m.tool_calls %}
            {%- set f = m.tool_calls[0].function %}
            {%- if m.content and m.thinking %}
                {{- raise_exception('Cannot pass both content and thinking in a message with calls.') }}
            {%- elif m.content or m.thinking and not later.answer %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.content or m.thinking) + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
            {{- (f.arguments if f.arguments is string else f.arguments | tojson) + '<|call|>' }}
            {%- set rest.call = f.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if m.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {%- if not rest.call %}{{- raise_exception('Message has tool role without a call before it.') }}{%- endif %}
        {{- '<|start|>functions.' + rest.call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}
        {{- '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

# All system turns come first; text before </think> is cut from the answer; results follow without a header.
DEEPSEEK = """
{{- bos_token }}
{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{%- endif %}{%- endfor %}
{%- for tool in tools or [] %}{{- '\\n## Tool\\n' + tool | tojson }}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|User|>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.index0 and messages[loop.index0 - 1].role != 'tool' %}{{- '<|Assistant|></think>' }}{%- endif %}
        {%- set text = m.content or '' %}
        {%- if '</think>' in text %}{%- set text = text.split('</think>', 1)[1] %}{%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.first %}{{- '<|calls|>' }}{%- endif %}
            {{- '<|call|>' + call.function.name + '<|sep|>' }}
            {{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
            {{- '<|/call|>' }}
            {%- if loop.last %}{{- '<|/calls|>' }}{%- endif %}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'tool' %}{{- '<|output|>' + m.content + '<|/output|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|Assistant|></think>' }}{%- endif %}"""

# The tools stand before the last user's turn alone, so that every turn moves them.
MISTRAL = """
{{- bos_token }}
{%- set state = namespace(system='', at=0, last=0) %}
{%- if messages[0].role == 'system' %}
    {%- set state.system = messages[0].content %}{%- set state.at = 1 %}
{%- endif %}
{%- for m in messages[state.at:] %}
    {%- if m.role == 'user' %}{%- set state.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages[state.at:] %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == state.last %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}
        {%- if loop.last and state.system %}{{- state.system + '\\n\\n' }}{%- endif %}
        {{- m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- ('' if loop.first else ', ') + '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson if call.function.arguments is mapping else call.function.arguments) }}
            {{- '}' }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user, assistant and tool roles are supported.') }}
    {%- endif %}
{%- endfor %}"""

# Each answer has its thinking, empty where there is none or where a later question follows.
GLM = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n<tools>\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '</tools>' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- set text = m.content %}
        {%- set thought = m.reasoning_content or '' %}
        {%- if not thought and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>\\n<think>' + (thought.strip() if loop.index0 > last.user else '') + '</think>' }}
        {%- if text.strip() %}{{- '\\n' + text.strip() }}{%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- set f = call.function or call %}
            {{- '\\n<tool_call>' + f.name + '\\n' }}
            {%- for name, value in f.arguments | items %}
                {{- '<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>\\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('\\n<think></think>' if enable_thinking is defined and not enable_thinking else '') }}
{%- endif %}"""

TEMPLATES = {
    "qwen 3": QWEN3,
    "qwen 3.5": QWEN35,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
    "mistral": MISTRAL,
    "glm": GLM,
}
ENDS = {
    "harmony": "<|return|> <|call|>",
    "glm": "<|user|> <|observation|>",
    **dict.fromkeys(("qwen 3", "qwen 3.5"), "<|im_end|>"),
}
"""The tokens that end a family's texts, other than the tokenizer's own."""
SPECIAL = (
    "<|im_start|> <|im_end|> <|start|> <|message|> <|channel|> "
    "<|end|> <|return|> <|call|> <|User|> <|Assistant|> <|calls|> <|/calls|> <|/call|> <|sep|> <|output|> <|/output|> "
    "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] "
    "[/TOOL_RESULTS] [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <|tool|> <|/tool|>"
)
PLAIN = "<think> </think> <tool_call> </tool_call> <tool_response> </tool_response>"  # added, but not special

CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
OTHER = {"id": "call00002", "type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 4}}}
WRITTEN = {**CALL, "function": {"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}}  # as servers log it
NUMBER = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds numbers.", "parameters": NUMBER}}]


def turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | fields


def result(call: dict[str, Any], content: str) -> dict[str, Any]:
    return turn("tool", content, tool_call_id=call["id"], name="add")


HELLO, AND, BRIEF = turn("user", "say hello"), turn("user", "and add?"), turn("system", "Be brief.")
ANSWER, CODE = turn("assistant", "hello world"), turn("assistant", "def add(a, b):\n    return a + b")
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one exchange": {"messages": [HELLO, ANSWER]},
    "three turns": {"messages": [BRIEF, HELLO, ANSWER, AND, CODE, HELLO, ANSWER]},
    "developer": {"messages": [turn("developer", "Be brief."), HELLO, ANSWER]},
    "parts": {"messages": [turn("user", [{"type": "text", "text": "say hello"}]), ANSWER]},
    "names": {"messages": [turn("user", "say hello", name="ann"), ANSWER]},
    "two users": {"messages": [HELLO, AND, ANSWER]},
    "two answers": {"messages": [HELLO, ANSWER, CODE]},
    "reasoning": {
        "messages": [
            HELLO,
            turn("assistant", "hello world", reasoning_content="say hello to the world"),
            AND,
            turn("assistant", "a + b", reasoning="return a and b"),
        ]
    },
    "thinking in text": {
        "messages": [
            HELLO,
            turn("assistant", "<think>\nsay hello\n</think>\n\nhello world"),
            AND,
            turn("assistant", "<think>\nadd\n</think>\n\na + b"),
        ]
    },
    "a call and its result": {
        "messages": [HELLO, turn("assistant", None, tool_calls=[WRITTEN]), result(CALL, "3"), ANSWER],
        "tools": TOOLS,
    },
    "agent": {
        "messages": [
            BRIEF,
            HELLO,
            turn("assistant", "", tool_calls=[CALL, OTHER], thinking="add both"),
            result(CALL, "3"),
            result(OTHER, "7"),
            turn("assistant", "3 and 7", thinking="now say them"),
            AND,
            turn("assistant", None, tool_calls=[CALL], reasoning_content="add again"),
        ],
        "tools": json.dumps(TOOLS),
    },
    "ends in a call": {
        "messages": [HELLO, ANSWER, AND, turn("assistant", "let me add", tool_calls=[CALL])],
        "tools": TOOLS,
    },
}


def tokenizer_of(template: str, texts: Sequence[str] = (), size: int = 340) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with the tokens of all families, and the template of one; it has also seen `texts`."""
    usual = ["def add(a, b):\n    return a + b\n", "hello world, say hello to the world", "a\n\n\nb" * 9]
    tokenizer = train_bpe([*texts, *usual, "user assistant system developer tool"], size)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL.split()])
    tokenizer.add_tokens([AddedToken(token) for token in PLAIN.split()])
    tokenizer.bos_token = tokenizer.eos_token = END_OF_TEXT
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer
