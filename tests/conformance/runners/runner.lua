-- The conformance runner of the Lua module. tests/conformance/README.md describes its commands and answers.

local here = arg[0]:match("^(.*)/[^/]*$") or "."
package.path = here .. "/../../../bindings/lua/?.lua;" .. package.path

local json = require("cjson")
local frameshard = require("frameshard")

local MIB = 1024 * 1024
local sidecar
local jobs = {}

local function mebibytes(bytes)
  return bytes and bytes / MIB
end

local function client()
  return sidecar or error({ name = "connection_lost" }, 0)
end

local function known_job(number)
  local job = jobs[number]
  if not job or job.ended then
    error({ name = "unknown_job" }, 0)
  end
  return job
end

local function said_job(job)
  jobs[job.number] = job
  return { job = job.number }
end

-- The dot products of the first row with each row.
local function cosines(rows)
  local found = {}
  for index, row in ipairs(rows) do
    local sum = 0
    for i, value in ipairs(row) do
      sum = sum + value * rows[1][i]
    end
    found[index] = sum
  end
  return found
end

-- Converts an event for the driver: without the module's tables, and with null for unknown values.
local function told(event)
  local made = { status = "ok" }
  for name, value in pairs(event) do
    made[name] = value
  end
  made.job = event.job and event.job.number
  if event.error then
    made.error, made.status, made.detail = nil, event.error.name, event.error.detail
  end
  local detail = made.detail
  made.detail = nil
  if event.type == "budget_observed" then
    made.observed_bytes = event.observed_bytes or json.null
    made.host_observed_bytes = event.host_observed_bytes or json.null
  elseif event.type == "kv" then
    made.text, detail = event.detail, nil
  elseif event.type == "caps" then
    made.total_bytes, made.free_bytes = event.total_bytes or json.null, event.free_bytes or json.null
    made.host_total_bytes = event.host_total_bytes or json.null
    made.host_free_bytes = event.host_free_bytes or json.null
  end
  if event.rows then
    made.rows, made.cosines = nil, cosines(event.rows)
  end
  local text = json.encode(made)
  return ('%s,"detail":%s}'):format(text:sub(1, -2), detail and detail ~= "" and detail or "{}")
end

local commands = {}

function commands.launch(command)
  local options = command.options
  local python = options.python
  options.python = nil
  sidecar = frameshard.launch({ model = options.model or "none", python = python, extra_json = json.encode(options) })
end

function commands.connect(command)
  sidecar = frameshard.connect(command.file)
end

function commands.ask(command)
  return said_job(client():ask(command.text, command.options))
end

function commands.tool_results(command)
  local results = {}
  for _, result in ipairs(command.results) do
    results[result[1]] = result[2]
  end
  return said_job(client():tool_results(results, command.options))
end

local function messages_of(command)
  local messages = {}
  for index, message in ipairs(command.messages) do
    local calls, call_id = {}, nil
    for at, call in ipairs(type(message[3]) == "table" and message[3] or {}) do
      calls[at] = { call_id = call[1], name = call[2], arguments = call[3] }
    end
    if type(message[3]) == "string" then
      call_id = message[3]
    end
    messages[index] = { role = message[1], content = message[2], tool_calls = calls, tool_call_id = call_id }
  end
  return messages
end

function commands.chat(command)
  return said_job(client():chat(messages_of(command), command.options))
end

function commands.count_tokens(command)
  return { request = client():count_tokens(command.prompt or messages_of(command), command.tools) }
end

function commands.embed(command)
  return { request = client():embed(command.texts) }
end

function commands.complete(command)
  return said_job(client():complete(command.prompt, command.options))
end

function commands.cancel(command)
  known_job(command.job):stop_generation()
end

function commands.set_priority(command)
  known_job(command.job):set_priority(command.priority)
end

function commands.forget(command)
  client():forget(command.conversation)
end

function commands.history(command)
  local messages = {}
  for index, message in ipairs(client():history(command.conversation)) do
    local calls = message.tool_calls and {}
    for at, call in ipairs(message.tool_calls or {}) do
      calls[at] = { call.call_id, call.name, call.arguments }
    end
    messages[index] = { message.role, message.content, calls or message.tool_call_id }
  end
  return { messages = messages }
end

function commands.get_http()
  local model = client():model()
  return { data = { model.http_url, model.http_key } }
end

function commands.save(command)
  local data = client():save(command.conversation)
  return { data = data:gsub(".", function(byte) return ("%02x"):format(byte:byte()) end) }
end

function commands.load(command)
  local data = command.data:gsub("..", function(hex) return string.char(tonumber(hex, 16)) end)
  return client():load(data, command.conversation)
end

function commands.save_kv(command)
  return { request = client():save_kv(command.conversation, command.path) }
end

function commands.load_kv(command)
  return { request = client():load_kv(command.path, command.conversation) }
end

function commands.set_lease(command)
  local lease = command.lease
  lease.vram_budget_mb, lease.vram_budget_bytes = mebibytes(lease.vram_budget_bytes), nil
  lease.floor_mb, lease.floor_bytes = mebibytes(lease.floor_bytes), nil
  lease.host_budget_mb, lease.host_budget_bytes = mebibytes(lease.host_budget_bytes), nil
  return { request = client():set_lease(lease) }
end

function commands.load_adapter(command)
  return { request = client():load_adapter(command.name, command.path) }
end

function commands.unload_adapter(command)
  return { request = client():unload_adapter(command.name) }
end

for _, name in ipairs({ "get_budget", "get_stats", "get_caps", "get_frame_block" }) do
  commands[name] = function()
    return { request = client()[name](client()) }
  end
end

function commands.get_plan(command)
  return { request = client():get_plan(mebibytes(command.vram_budget_bytes), command.prompt_tokens) }
end

function commands.set_pacing(command)
  return { request = client():set_pacing(command.scheduling_mode, command.target_tokens_per_second) }
end

function commands.draw(command)
  local block = frameshard.frame_block(command.path, command.target_frame_s)
  for _ = 1, command.frames do
    block:frame_begin()
    block:frame_end(command.gpu_busy_s)
  end
  block:close()
end

function commands.poll(command)
  local events = client():poll(command.limit)
  if #events == 0 then
    client():wait(command.timeout_s)
    events = client():poll(command.limit)
  end
  local list = {}
  for index, event in ipairs(events) do
    list[index] = told(event)
  end
  return nil, table.concat(list, ",")
end

function commands.shutdown()
  client():shutdown()
end

function commands.close()
  if sidecar then
    sidecar:close(10)
  end
  sidecar, jobs = nil, {}
end

for line in io.lines() do
  local command = json.decode(line)
  local done, answer, events = pcall(commands[command["do"]], command)
  local said
  if not done then
    if type(answer) == "string" then
      error(answer)
    end
    said = json.encode({ ok = false, error = answer.name })
  elseif events then
    said = ('{"ok":true,"events":[%s]}'):format(events)
  else
    answer = answer or {}
    answer.ok = true
    said = json.encode(answer)
  end
  io.write(said, "\n")
  io.flush()
end
commands.close()
