-- Mira, the innkeeper, is a language model beside the game. Type something to her, and move the slider while she answers:
-- it sets the model's VRAM budget. F5 saves what was said, F9 loads it, also after a restart.
--
--     love samples/love_tavern MODEL.gguf [--device emulated] [--python PATH]
--     love samples/love_tavern MODEL.gguf --unattended [--screenshot SHOT.png]
--
-- Unattended, three lines are asked and the slider moves down and up during each answer. Before the third line the
-- conversation is saved, forgotten and loaded. The exit status is 1 if an answer or a saved message is missing, or if the
-- budget did not change in both directions during an answer.

local HERE = love.filesystem.getSource()
package.path = HERE .. "/../../bindings/lua/?.lua;" .. package.path -- your own game has the file beside main.lua

local scene = require("scene")
local hud = require("hud")
local frameshard

local MIB = 1024 * 1024
local PERSONA = "You are Mira, the innkeeper of the Gilded Tankard, a warm tavern in a mountain village. You speak to a "
  .. "traveller. You always answer in character, in the first person, in three or four friendly sentences."
local LINES = {
  "Good evening! I have walked all day. What is for supper?",
  "Have you heard any stories about the old ruins on the hill?",
  "Then I will need a room for the night. What can you offer me?",
}
local LESS_AT, SHOWN = 8, 10 -- unattended: tokens before the budget falls, and tokens with the small budget
local READING_S = 1 -- pause between two lines, unattended

local options = { device = "auto", save = "mira.save" } -- the save is in LÖVE's directory for this game
local sidecar, job, request, banner
local typed, question, tokens, silent_s = "", nil, 0, 0
local hint = "Say something to Mira, then Enter; F5 saves, F9 loads"
local vram
local asked, answers, shrinks, grows, given_back = 0, 0, 0, 0, false

local function read_arguments(arguments)
  local at = 1
  while arguments[at] do
    local name = arguments[at]:match("^%-%-(%w+)$")
    if name == "unattended" then
      options.unattended, options.save = true, "unattended.save"
    elseif name == "device" or name == "python" or name == "screenshot" then
      at = at + 1
      options[name] = arguments[at]
    else
      options.model = arguments[at]
    end
    at = at + 1
  end
end

-- Ends the conversation. The first reason goes to standard error, and to the screen until the player leaves.
local function fail(text)
  if banner then
    return
  end
  banner = text .. "\n(Escape leaves)"
  io.stderr:write(text, "\n")
  if options.unattended then
    love.event.quit(1)
  end
end

-- ---- talking --------------------------------------------------------------------------------------------------------

local function ask(text)
  question, tokens = text, 0
  local started = love.timer.getTime()
  job = sidecar:ask(text, {
    conversation = "mira",
    system = PERSONA,
    sampling = { max_tokens = 100, temperature = 0.6, repeat_penalty = 1.1, seed = 2 },
    response_finished = function()
      answers = answers + 1
    end,
    response_failed = function(error)
      if error.name ~= "cancelled" then
        fail(tostring(error))
      end
    end,
  })
  job.started = started
end

local function save()
  local written, reason = love.filesystem.write(options.save, sidecar:save("mira"))
  hint = written and "Saved; F9 loads it again" or "Not saved: " .. reason
end

local function load()
  local data = love.filesystem.read(options.save)
  if not data then
    hint = "Nothing is saved yet; F5 saves"
    return
  end
  local loaded, reason = pcall(sidecar.load, sidecar, data, "mira")
  if not loaded then
    hint = tostring(reason)
    return
  end
  question, job = nil, nil
  hint = ("Mira remembers %d messages"):format(#sidecar:history("mira"))
end

-- The slider may move every frame; a budget is proposed when the last proposal has its answer.
local function propose()
  if vram and not request and math.floor(vram.wanted) ~= vram.proposed then
    vram.proposed = math.floor(math.max(vram.wanted, vram.floor))
    vram.wanted = vram.proposed
    request = sidecar:set_budget(vram.proposed / MIB)
  end
end

local function released(event)
  local speaking = job and not job.ended and tokens > 0
  if speaking and event.budget_bytes < vram.budget then
    shrinks = shrinks + 1
  elseif speaking and event.budget_bytes > vram.budget then
    grows = grows + 1
  end
  vram.budget, vram.used, vram.changed_at = event.budget_bytes, event.used_bytes, tokens
end

local function take(event)
  if event.type == "ready" then
    local full = event.full_bytes
    vram = { floor = event.floor_bytes, full = full, wanted = full, budget = full, used = full, proposed = full }
  elseif event.type == "text" then
    local now = love.timer.getTime()
    local first = tokens == 0
    tokens = tokens + event.tokens
    if first then
      job.spoke, job.before = now, tokens
    elseif now > job.spoke then
      vram.rate = (tokens - job.before) / (now - job.spoke)
    end
  elseif event.type == "budget_released" then
    released(event)
  elseif event.type == "budget_observed" or event.type == "refused" then
    request = nil
    if event.error then
      fail(tostring(event.error))
    end
  elseif event.type == "closed" then
    fail(event.error and tostring(event.error) or "the sidecar was shut down")
  end
end

-- ---- unattended -----------------------------------------------------------------------------------------------------

local function screenshot()
  love.graphics.captureScreenshot(function(image)
    local file = assert(io.open(options.screenshot, "wb"))
    file:write(image:encode("png"):getString())
    file:close()
    options.screenshot = nil
  end)
end

-- Saves the conversation and loads it again, as after a restart.
local function restart()
  local said = #sidecar:history("mira")
  save()
  sidecar:forget("mira")
  load()
  if hint ~= ("Mira remembers %d messages"):format(said) then
    fail(hint)
  end
end

local function play(dt)
  if job and not job.ended then
    if vram.budget < vram.full and tokens >= vram.changed_at + SHOWN then
      if options.screenshot and asked >= 2 then
        screenshot()
      end
      vram.wanted = vram.full
      given_back = true
    elseif tokens >= LESS_AT and not given_back then
      vram.wanted = vram.floor + (vram.full - vram.floor) / 4
    end
    silent_s = 0
    return
  end
  vram.wanted = vram.full
  silent_s = silent_s + dt
  if silent_s < READING_S then
    return
  elseif asked < #LINES then
    asked, given_back = asked + 1, false
    if asked == #LINES then
      restart()
    end
    ask(LINES[asked])
  elseif options.screenshot then
    screenshot() -- an answer may end before its frame is drawn
  else
    print(("%d answers; %d shrinks and %d grows while she spoke"):format(answers, shrinks, grows))
    love.event.quit(answers == #LINES and shrinks > 0 and grows > 0 and 0 or 1)
  end
end

-- ---- LÖVE's calls ---------------------------------------------------------------------------------------------------

function love.load(arguments)
  read_arguments(arguments)
  scene.load()
  hud.load()
  love.keyboard.setKeyRepeat(true)
  if not options.model then
    fail("love samples/love_tavern MODEL.gguf [--device NAME] [--python PATH] [--unattended]")
    return
  end
  local found, module = pcall(require, "frameshard")
  if not found then
    fail("The C library is missing: build bindings/c and set FRAMESHARD_LIBRARY to its path.\n" .. module)
    return
  end
  frameshard = module
  local launched, client = pcall(frameshard.launch, { model = options.model, device = options.device,
    python = options.python, n_parallel = 1, n_ctx = 2048, client_name = "tavern" })
  if not launched then
    fail(tostring(client))
    return
  end
  sidecar = client
end

function love.update(dt)
  local talks = job and not job.ended
  scene.update(dt, talks and tokens > 0, talks and tokens == 0)
  if not sidecar then
    return
  end
  for _, event in ipairs(sidecar:poll()) do -- all of the model's work in a frame
    take(event)
  end
  if vram and not banner then
    if options.unattended then
      play(dt)
      love.timer.sleep(0.05) -- no player: leave the CPU to the model
    end
    propose()
  end
end

local function place() -- the scene in the middle of the window, as large as fits
  local w, h = love.graphics.getDimensions()
  local scale = math.min(w / scene.width, h / scene.height)
  return love.math.newTransform((w - scene.width * scale) / 2, (h - scene.height * scale) / 2, 0, scale)
end

function love.draw()
  scene.light()
  love.graphics.applyTransform(place())
  scene.draw()
  if question then
    hud.player_says(question, scene.you)
  end
  if job and job.text ~= "" then
    hud.npc_says(job.text, scene.mouth)
  end
  hud.typed(typed, hint)
  if vram then
    hud.slider(vram)
  end
  if banner or not vram then
    hud.banner(banner or "Mira is coming down the stairs ...")
  end
end

function love.textinput(text)
  typed = typed .. text
end

function love.keypressed(key)
  if key == "escape" then
    love.event.quit(banner and 1 or 0)
  elseif key == "backspace" then
    typed = typed:gsub("[%z\1-\127\194-\244][\128-\191]*$", "")
  elseif key == "return" and typed ~= "" and vram and not banner and not (job and not job.ended) then
    ask(typed)
    typed = ""
  elseif (key == "f5" or key == "f9") and vram and not banner and not (job and not job.ended) then
    (key == "f5" and save or load)()
  elseif vram and (key == "left" or key == "right") then
    vram.wanted = math.max(vram.floor, math.min(vram.full, vram.wanted + (key == "left" and -8 or 8) * MIB))
  end
end

local function drag(x, y)
  local chosen = vram and hud.slider_at(x, y, vram)
  if chosen then
    vram.wanted = math.max(vram.floor, chosen)
  end
end

function love.mousepressed(x, y)
  drag(place():inverseTransformPoint(x, y))
end

function love.mousemoved(x, y)
  if love.mouse.isDown(1) then
    drag(place():inverseTransformPoint(x, y))
  end
end

function love.quit()
  if sidecar then
    sidecar:close(3)
  end
end
