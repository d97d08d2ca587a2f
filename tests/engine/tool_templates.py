"""Chat templates that show tools as well-known families of models do: short ones, in the syntax of each family."""

QWEN = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'You are helpful.' }}{%- endif %}
{{- "\\n\\n# Tools\\n\\nYou may call one or more functions.\\n\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\n\\nFor each call, return a json object within <tool_call></tool_call> tags:\\n<tool_call>\\n\
{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == "user" or (message.role == "system" and not loop.first)
    or (message.role == "assistant" and not message.tool_calls) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- elif message.role == "assistant" %}
{{- '<|im_start|>' + message.role }}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}
{{- '}\\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif message.role == "tool" %}
{%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
{%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system + "<|eot_id|>" }}
{%- if tools is not none %}
{%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}
{{- 'Respond in the format {"name": function name, "parameters": dictionary}.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{{- first + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- elif 'tool_calls' in message %}
{%- if not message.tool_calls|length == 1 %}
{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
{%- set tool_call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
{{- "<|eot_id|>" }}
{%- else %}
{{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}{{- message.content | tojson }}{{- "<|eot_id|>" }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
{%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}
{%- if tools is not none and (message == user_messages[-1]) %}
{{- "[AVAILABLE_TOOLS] [" }}
{%- for tool in tools %}{{- tool | tojson }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "][/AVAILABLE_TOOLS]" }}{%- endif %}
{%- if loop.last and system_message is defined %}
{{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- "[TOOL_CALLS] [" }}
{%- for tool_call in message.tool_calls %}
{%- set out = tool_call.function|tojson %}{{- out[:-1] }}
{%- if not tool_call.id is defined or tool_call.id|length != 9 %}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}{%- endif %}
{{- ', "id": "' + tool_call.id + '"}' }}
{%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}{%- endfor %}
{%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
{%- elif message["role"] == "tool_results" or message["role"] == "tool" %}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " }}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}{%- endfor %}
"""

FUNCTION_TAGS = """\
{%- for tool in tools or [] %}{{- "<tool>" + tool.function | tojson + "</tool>\\n" }}{%- endfor %}
{%- for message in messages %}{{- "<|" + message.role + "|>" + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if call.function.arguments is not string %}{{- raise_exception("no text") }}{%- endif %}
{{- "<function=" + call.function.name + ">" }}{{- call.function.arguments }}
{{- "</function>" }}{%- endfor %}{{- "<|end|>" }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{%- endif %}
"""

NO_TOOLS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

REFUSES_TOOLS = '{%- if tools %}{{- raise_exception("tools of another form are expected") }}{%- endif %}' + NO_TOOLS

NO_SYSTEM = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' + message.content | trim }}
{{- '<end_of_turn>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

XML = """\
{%- for tool in tools or [] %}{{- "<tool>" + tool.function | tojson + "</tool>\\n" }}{%- endfor %}
{%- for message in messages %}{{- "<|" + message.role + "|>" + message.content }}
{%- for call in message.tool_calls or [] %}{{- "<call>" + call.function.name }}
{%- for key, value in call.function.arguments.items() %}{{- "<arg>" + key + "=" + value + "</arg>" }}{%- endfor %}
{{- "</call>" }}{%- endfor %}{{- "<|end|>" }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|>" }}{%- endif %}
"""

COMMAND = """\
{%- for tool in tools or [] %}{{- "<|SYSTEM|>" + tool.function | tojson + "<|end|>" }}{%- endfor %}
{%- for message in messages %}
{%- if message.role != "assistant" %}{{- "<|USER|>" + message.content + "<|end|>" }}
{%- elif message.tool_calls %}{{- "<|CHATBOT|><|START_THINKING|><|END_THINKING|><|START_ACTION|>[" }}
{%- for call in message.tool_calls %}
{{- '{"tool_call_id": "' ~ loop.index0 ~ '", "tool_name": "' + call.function.name + '", "parameters": ' }}
{{- call.function.arguments | tojson + "}" }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "]<|END_ACTION|><|end|>" }}
{%- else %}{{- "<|CHATBOT|><|START_RESPONSE|>" + message.content + "<|END_RESPONSE|><|end|>" }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|CHATBOT|><|START_THINKING|><|END_THINKING|>" }}{%- endif %}
"""

NEMOTRON = """\
{%- for tool in tools or [] %}{{- "<tool>" + tool.function | tojson + "</tool>\\n" }}{%- endfor %}
{%- for message in messages %}{{- "<|" + message.role + "|>" }}
{%- if message.tool_calls %}{{- "<TOOLCALL>[" }}
{%- for call in message.tool_calls %}{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + "}" }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}
{{- "]</TOOLCALL>" }}
{%- elif message.role == "assistant" %}{{- "<think>\\n" + message.content }}
{%- else %}{{- message.content }}{%- endif %}{{- "<|end|>" }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|assistant|><think>\\n" }}{%- endif %}
"""

MISTRAL_SMALL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == "assistant" %}
{%- for call in message.tool_calls or [] %}
{{- "[TOOL_CALLS]" + call.function.name + "[CALL_ID]" + call.id + "[ARGS]" + call.function.arguments | tojson }}
{%- endfor %}{{- message.content + eos_token }}
{%- elif message.role == "tool" %}
{{- "[TOOL_RESULTS]" + message.tool_call_id + "[TOOL_CONTENT]" + message.content + "[/TOOL_RESULTS]" }}
{%- else %}
{%- if tools and message.role == "user" %}{{- "[AVAILABLE_TOOLS]" + tools | tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{{- "[INST]" + message.content + "[/INST]" }}{%- endif %}{%- endfor %}
"""

GEMMA = """\
{%- for tool in tools or [] %}{{- "<|tool>" + tool.function.name + tool.function.description + "<tool|>" }}{%- endfor %}
{%- for message in messages %}{{- "<|turn>" + message.role + "\\n" }}
{%- for call in message.tool_calls or [] %}{{- "<|tool_call>call:" + call.function.name + "{" }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{%- for key, value in call.function.arguments.items() %}{{- key + ":" + value | string }}{%- endfor %}
{%- endif %}{{- "}<tool_call|>" }}{%- endfor %}
{{- message.content + eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|turn>assistant\\n" }}{%- endif %}
"""

HARMONY = """\
{%- for tool in tools or [] %}{{- "<|start|>developer<|message|>" + tool.function | tojson + "<|end|>" }}{%- endfor %}
{%- for message in messages %}{{- "<|start|>" + message.role }}
{%- if message.tool_calls %}{{- " to=functions." + message.tool_calls[0].function.name }}
{{- "<|channel|>commentary json<|message|>" + message.tool_calls[0].function.arguments | tojson + "<|call|>" }}
{%- else %}
{%- if message.thinking %}{{- "<|channel|>analysis<|message|>" + message.thinking }}
{{- "<|end|><|start|>assistant" }}{%- endif %}
{%- if message.role == "assistant" %}{{- "<|channel|>final" }}{%- endif %}
{{- "<|message|>" + message.content + "<|end|>" }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{%- endif %}
"""

CLOSES_TEXT = """\
{%- for tool in tools or [] %}{{- "<|open|>" + tool.function | tojson + "<|close|>" }}{%- endfor %}
{%- for message in messages %}{{- "<|open|>" + message.role + "<|sep|>" + message.content + "<|close|>" }}
{%- for call in message.tool_calls or [] %}{{- "<|open|>" + call.function.name + "<|sep|>" }}
{{- call.function.arguments | tojson + "<|close|>" }}{%- endfor %}{{- "<|end|>" }}{%- endfor %}
{%- if add_generation_prompt %}{{- "<|open|>assistant<|sep|>" }}{%- endif %}
"""
