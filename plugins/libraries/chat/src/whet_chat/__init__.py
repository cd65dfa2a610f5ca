"""What a model wrote, in parts: its reasoning, its content, and its tool calls. For every chat template.

    format = response_format(chat)              the format of this template, learned by rendering it, then kept
    format.read(text, tools)                    -> Message("assistant", content, calls, reasoning=...)
    format.why                                  why the template cannot be used with tools; empty: it can
    tool_format(chat)                           the same format. Raises `DataError` if the template shows no tools

`chat` obeys `whet.interfaces.chat.Chat`. `text` is a response with its special tokens, without the stop token; `tools`
is `whet.data.messages.Tools`, the JSON of each tool. What cannot be read as a call stays in the
content: `read` raises nothing, whatever a model wrote. The calls have no ids yet: a recorded reply has them.

An environment needs none of this. It begins a sequence with tools, and each reply has the calls:

    talk = model.with_tools(tools)              prompts of this sequence describe the tools, as the template does
    reply = await talk.reply(task.prompt)       reply.text is what the model wrote, reply.calls are its calls
    await talk.reply([Message("tool", "7", answers=reply.calls[0].id)])

No template is known by name. `learn` renders a conversation with calls, and takes the first kind of format that reads
back what the template wrote:

    json      {"name": "f", "arguments": {"x": 1}} in any frame, f<sep>{"x": 1}, or {"f": {"x": 1}}
    tagged    <function=f><parameter=x>1</parameter></function> and its relatives: names and values between tags
    python    [f(x=1)]
    braces    call:f{x:1}
    elements  <invoke name="f"><x>1</x></invoke>
    channels  to=functions.f<|message|>{"x": 1}, where reasoning is a channel, too
"""
