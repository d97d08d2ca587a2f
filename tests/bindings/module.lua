-- Tests of the Lua module with a real sidecar and a real model, for what the conformance scenarios do not cover.

local frameshard = require("frameshard")

local MIB = 1024 * 1024

local function launch(model)
  return frameshard.launch({
    model = model or os.getenv("FRAMESHARD_MODEL"), mmproj = os.getenv("FRAMESHARD_MMPROJ"),
    python = os.getenv("FRAMESHARD_PYTHON"), device = "emulated", n_ctx = 1024, n_parallel = 1, kv_type = "f16", speculate = "off",
  })
end

local function poll_until(sidecar, condition)
  local deadline = os.time() + 120
  while true do
    for _, event in ipairs(sidecar:poll()) do
      if condition(event) then
        return event
      end
    end
    assert(os.time() < deadline, "it does not happen")
    sidecar:wait(0.1)
  end
end

local function failure(...)
  local done, error = pcall(...)
  assert(not done, "it did not fail")
  assert(type(error) == "table", error)
  return error
end

local function alive(pid)
  local file = io.open(("/proc/%d/stat"):format(pid))
  local stat = file and file:read("*a")
  if file then
    file:close()
  end
  return stat and not stat:match("%) [ZX]") or false
end

local function gone(pid)
  local deadline = os.time() + 20
  while alive(pid) do
    assert(os.time() < deadline, "the sidecar is still there")
    collectgarbage()
  end
end

local sidecar = launch()
local ready = poll_until(sidecar, function(event) return event.type == "ready" end)
local model = sidecar:model()
assert(ready.full_bytes == model.full_bytes and ready.name == model.name)

-- callbacks get the whole answer; an error in a callback is raised from poll, and no event is lost
local heard, finished, job = {}, nil, nil
job = sidecar:ask("Any rooms left?", {
  sampling = { max_tokens = 12, temperature = 0 },
  response_updated = function(delta)
    heard[#heard + 1] = delta
    if #heard == 2 then
      error("of the game", 0)
    end
  end,
  response_finished = function(text) finished = text end,
})
local thrown, listed = 0, {}
while not job.ended do
  local done, problem = pcall(function()
    sidecar:wait(0.1)
    for _, event in ipairs(sidecar:poll()) do
      listed[#listed + 1] = event.text
    end
  end)
  if not done then
    assert(problem == "of the game", problem)
    thrown = thrown + 1
  end
end
assert(thrown == 1)
assert(table.concat(listed) == job.text, "an event is in no list")
assert(finished == job.text and table.concat(heard) == job.text and job.result.n_generated == 12)

-- the budget changes during an answer, and the answer can be ended early
local half = math.floor((model.floor_bytes + model.full_bytes) / 2 / MIB)
local failed
job = sidecar:ask("Tell me a long story.", {
  sampling = { max_tokens = 700, temperature = 0 },
  response_failed = function(error) failed = error end,
})
poll_until(sidecar, function(event) return event.type == "text" end)
local request = sidecar:set_budget(half)
local released = poll_until(sidecar, function(event) return event.type == "budget_released" end)
assert(released.request == request and released.used_bytes <= half * MIB and not job.ended)
job:stop_generation()
poll_until(sidecar, function() return job.ended end)
assert(failed.name == "cancelled" and tostring(failed) == "cancelled: the job was cancelled")
job:stop_generation() -- once more does no harm

-- an image makes the prompt longer
local function length_with(images)
  sidecar:ask("What do you see?", { images = images, sampling = { max_tokens = 1, temperature = 0 } })
  local encoded = false
  local done = poll_until(sidecar, function(event)
    encoded = encoded or event.type == "progress" and event.phase == "encode"
    return event.type == "done"
  end)
  assert(encoded == (images ~= nil))
  return done.n_prompt
end
local pixels = { format = "rgb", width = 8, height = 8, data = ("\255"):rep(192) }
assert(length_with({ pixels }) > length_with(nil))
pixels.data = pixels.data:sub(2)
assert(failure(sidecar.ask, sidecar, "And now?", { images = { pixels } }).name == "bad_argument")

-- an answer that matches a schema
job = sidecar:ask("Yes or no?", { sampling = { json_schema = '{"enum": ["yes", "no"]}', temperature = 0 } })
poll_until(sidecar, function() return job.ended end)
assert(job.text == '"yes"' or job.text == '"no"', job.text)
assert(not sidecar:has_feature("songs"))

-- wrong arguments are refused
sidecar:set_budget(1)
local refused = poll_until(sidecar, function(event) return event.type == "refused" end)
assert(refused.error.name == "budget_below_floor" and refused.floor_bytes > 0)
assert(refused.error.detail:find("floor_bytes", 1, true))
sidecar:set_budget(1e-12) -- the rest of a subtraction is a budget, and not 0 for no limit
refused = poll_until(sidecar, function(event) return event.type == "refused" end)
assert(refused.error.name == "budget_below_floor")
assert(failure(sidecar.ask, sidecar, "half a character: \240\159").name == "bad_argument")
assert(failure(sidecar.ask, sidecar, "?", { temprature = 0 }).message:find("temprature", 1, true))
for _, options in ipairs({
  { sampling = { stop = "END" } }, { sampling = { stop = { "a", nil, "b" } } }, { sampling = { choices = 5 } },
  { sampling = { logit_bias = 5 } }, { images = "x" }, { tools = "x" }, { tools = { { name = "x", schema = false } } },
  { adapters = "x" }, { adapters = { "mira" } }, { response_updated = 5 }, { response_failed = "x" },
}) do
  assert(failure(sidecar.ask, sidecar, "?", options).name == "bad_argument")
end
local user = { role = "user", content = "?" }
for _, messages in ipairs({ "hi", { "hi" }, { user, nil, user }, { { role = "user", content = "?", tool_calls = "x" } } }) do
  assert(failure(sidecar.chat, sidecar, messages).name == "bad_argument")
end
assert(failure(sidecar.embed, sidecar, "x").name == "bad_argument")
assert(failure(sidecar.embed, sidecar, { "a", nil, "b" }).name == "bad_argument")
assert(failure(sidecar.tool_results, sidecar, nil, { conversation = "mira" }).name == "bad_argument")
assert(failure(sidecar.poll, sidecar, "x").name == "bad_argument")
assert(failure(sidecar.close, sidecar, "x").name == "bad_argument")
table.insert(sidecar:poll(), { type = "of the game" })
for _, event in ipairs(sidecar:poll()) do
  assert(event.type ~= "of the game", "two polls return one table")
end
assert(failure(sidecar.set_pacing, sidecar, "whatever").name == "bad_argument")
assert(failure(frameshard.connect, "/no/such/file").name == "connection_lost")

-- the frame block
sidecar:set_pacing("prioritize_graphics")
sidecar:get_frame_block()
local block = frameshard.frame_block(poll_until(sidecar, function(event) return event.type == "frame_block" end).path,
  1 / 60)
block:frame_begin()
block:frame_end(0.004)
block:idle()
assert(block:answer().applied_generation == 0)
block:close()
block:close()
assert(failure(block.frame_begin, block).name == "bad_argument")

-- ends of a sidecar: closed, garbage-collected, never loaded
sidecar:close()
sidecar:close()
assert(sidecar:state() == "closed" and not alive(model.pid))
assert(failure(sidecar.ask, sidecar, "Still there?").name == "connection_lost")

local pid
do
  local forgotten = launch()
  poll_until(forgotten, function(event) return event.type == "ready" end)
  pid = forgotten:model().pid
end
gone(pid)

-- no callback is called after a callback has closed the sidecar
local early, called = launch(), 0
local function close_at_once()
  called = called + 1
  early:close()
end
early:ask("Hello?", { conversation = "mira" })
for _ = 1, 3 do -- jobs that wait for their conversation: they end in the next poll
  early:ask("Hello?", { conversation = "mira", response_failed = close_at_once }):stop_generation()
end
assert(#early:poll() == 1 and called == 1, called)
assert(#early:poll() == 0 and called == 1)

local missing = launch("/no/such/model.gguf")
assert(poll_until(missing, function(event) return event.type == "closed" end).error.name == "model_not_found")
print("ok")
