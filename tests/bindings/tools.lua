-- tools.lua PYTHON MODEL: calls of tools and their results, through the C library with a real model.
local ffi = require("ffi")
local frameshard = require("frameshard")

local sidecar = frameshard.launch({ python = arg[1], model = arg[2], device = "cpu", n_threads = 1 })
local warm = { max_tokens = 150, temperature = 1.5, top_k = 0, top_p = 1, min_p = 0, seed = 5 }
local price = {
  name = "price",
  description = "The price of an item.",
  schema = [[{"type": "object", "properties": {"item": {"enum": ["ale", "bread"]}}, "required": ["item"]}]],
}

local function finished(job)
  local called = {}
  while not job.ended do
    sidecar:wait(1)
    for _, event in ipairs(sidecar:poll()) do
      if event.type == "tool_call" and event.job == job then
        called[#called + 1] = event
      end
    end
  end
  assert(job.result, job.error and job.error.message)
  return called
end

local function refused(...)
  local done, why = pcall(sidecar.tool_results, sidecar, ...)
  assert(not done and why.name == "bad_argument", tostring(why))
end

local job = sidecar:ask("What is ale?", { conversation = "mira", sampling = warm, tools = { price }, tool_choice = "price" })
local called = finished(job)
assert(#called > 0 and #called == #job.tool_calls)
local results = {}
for _, call in ipairs(called) do
  assert(call.name == "price" and call.arguments:match('^{"item": ?"%l+"}$'), call.arguments)
  results[call.call_id] = "2 gold"
end
assert(job.text == "")

refused({ ["another id"] = "2 gold" }, { conversation = "mira" })
refused(results, { conversation = "nobody" })
refused(results, {})

-- Results to which nothing else refers.
local function results_of_the_game()
  local made = {}
  for id in pairs(results) do
    made[id] = ("2 gold "):rep(20)
  end
  return made
end

-- Instead of ffi.new: frees what nothing refers to, and fills its memory, whenever the module makes a struct.
local new, texts = ffi.new, {}
local function reuse_memory(...)
  collectgarbage()
  for _ = 1, 200 do
    texts[#texts + 1] = ("x"):rep(130) .. ("%010d"):format(#texts) -- as long as a result
  end
  return new(...)
end

-- A saved game keeps the calls that wait for their results.
sidecar:load(sidecar:save("mira"), "later")
for _, conversation in ipairs({ "mira", "later" }) do
  ffi.new = reuse_memory
  local options = { conversation = conversation, sampling = { max_tokens = 8, temperature = 0 } }
  local answer = sidecar:tool_results(results_of_the_game(), options)
  ffi.new = new
  assert(#finished(answer) == 0)
  local told = sidecar:history(conversation)
  assert(told[1].role == "user" and told[2].role == "assistant", told[2].role)
  assert(told[3].role == "tool" and told[3].content == ("2 gold "):rep(20), told[3].content)
end

-- A question instead of results: the calls are forgotten.
local again = { conversation = "impatient", sampling = warm, tools = { price }, tool_choice = "required" }
assert(#finished(sidecar:ask("What is ale?", again)) > 0)
finished(sidecar:ask("Never mind.", { conversation = "impatient", sampling = { max_tokens = 8, temperature = 0 } }))
assert(sidecar:history("impatient")[1].content == "Never mind.")
refused(results, { conversation = "impatient" })

local odd = sidecar:ask("What is ale?", { tools = { { name = "a b" } } })
while not odd.ended do
  sidecar:wait(1)
  sidecar:poll()
end
assert(odd.error.name == "bad_argument", odd.error.name)
sidecar:close()
print("ok")
