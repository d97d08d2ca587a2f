## Asks a sidecar whose engine is a stand-in, and prints what the nodes say.
extends Node

@onready var sidecar: FrameshardSidecar = $Sidecar
@onready var mira: FrameshardNpc = $Mira


func _ready() -> void:
	await try_again()
	mira.error_raised.connect(func(error: String, text: String) -> void: print("npc ", error, " ", text.length() > 10))
	mira.ask("too early")
	await mira.error_raised
	check(mira.stop == PackedStringArray(["never", "ever"]) and mira.temperature == 0.0 and mira.max_tokens == 8)
	mira.seed = 3
	mira.set("max_tokens", "many")
	check(mira.max_tokens == 8)
	check(mira.get("seed") == 3 and mira.persona == "You are Mira: “hello”.")
	await talk()
	await change_budgets()
	await save_and_load()
	await lose_the_engine()
	await stop_and_free()
	sidecar.close()
	check(not sidecar.is_model_ready())
	await sidecar.closed
	get_tree().quit()


func check(holds: bool) -> void:
	if not holds:
		printerr("a check has failed: ", get_stack())
		get_tree().quit(1)


## A listener that tries again at once does not keep the frame from ending.
func try_again() -> void:
	var tries := [0]
	var again := func(_error: String, _text: String) -> void:
		tries[0] += 1
		if tries[0] < 1000:
			mira.ask("too early")
	mira.error_raised.connect(again)
	mira.ask("too early")
	for frame in 3:
		await get_tree().process_frame
	mira.error_raised.disconnect(again)
	check(tries[0] in [2, 3])
	for frame in 2:
		await get_tree().process_frame


func talk() -> void:
	sidecar.python = OS.get_environment("FRAMESHARD_PYTHON")
	sidecar.log_file = "user://sidecar.log"
	sidecar.extra_json = OS.get_environment("FRAMESHARD_EXTRA")
	await refuse_launches()
	var report := func(stage: String, done: int, total: int) -> void: print("loading ", stage, " ", done, " of ", total)
	sidecar.loading_updated.connect(report)
	sidecar.events_per_frame = 0
	sidecar.launch()
	var deltas := PackedStringArray()
	mira.response_updated.connect(func(delta: String) -> void: deltas.append(delta))
	var hear := func(sentence: String) -> void: print("sentence '", sentence, "'")
	mira.sentence_finished.connect(hear)
	mira.ask("One two. Three “four”")
	check(mira.is_speaking() and not sidecar.is_model_ready())
	var model: Array = await sidecar.model_ready
	sidecar.loading_updated.disconnect(report)
	print("model ", model[0], " ", model[1], " ", model[2])
	var answer: String = await mira.response_finished
	mira.sentence_finished.disconnect(hear)
	print("answer '", answer, "' ", "".join(deltas) == answer, " ", mira.is_speaking())
	mira.priority = 4294967297
	mira.ask("more urgent than there is")
	await mira.error_raised
	mira.priority = 1


func refuse_launches() -> void:
	var set_mb := sidecar.vram_budget_mb
	sidecar.vram_budget_mb = -1
	sidecar.launch()
	print("launch ", (await sidecar.error_raised)[0])
	sidecar.vram_budget_mb = set_mb
	sidecar.n_parallel = 4294967297
	sidecar.launch()
	print("launch ", (await sidecar.error_raised)[0])
	sidecar.n_parallel = 1
	sidecar.adapters = ["mira=res://no.gguf"]
	sidecar.launch()
	var missing: Array = await sidecar.error_raised
	print("launch ", missing[0], " ", ProjectSettings.globalize_path("res://no.gguf") in missing[1])
	sidecar.adapters = []


func change_budgets() -> void:
	sidecar.error_raised.connect(
		func(error: String, text: String) -> void: print("sidecar ", error, " ", text.length() > 10))
	sidecar.vram_budget_mb = 64
	print("released ", await sidecar.budget_released)
	await refuse_sizes()
	sidecar.target_frame_rate = 0.01
	await sidecar.error_raised
	sidecar.target_frame_rate = 60
	sidecar.set_lease(32, "active")
	await sidecar.budget_released
	sidecar.vram_budget_mb = 1e-12 # the rest of a subtraction is a budget, and not 0 for no limit
	await sidecar.error_raised
	sidecar.host_budget_mb = 0
	print("active ", await sidecar.budget_released)
	sidecar.set_lease(32, "parked")
	print("parked ", await sidecar.budget_released)
	sidecar.host_budget_mb = 0
	print("parked ", await sidecar.budget_released)
	sidecar.vram_budget_mb = 48
	print("parked ", await sidecar.budget_released)
	sidecar.set_lease(64, "nonsense")
	await sidecar.error_raised
	sidecar.set_lease(64, "active")
	await sidecar.budget_released


func refuse_sizes() -> void:
	for size_mb: float in [-1.0, INF, NAN]:
		sidecar.set_lease(size_mb, "active")
		await sidecar.error_raised
		sidecar.host_budget_mb = size_mb
		await sidecar.error_raised
	sidecar.host_budget_mb = 0
	print("still ", await sidecar.budget_released)


func save_and_load() -> void:
	var saved := mira.save_conversation()
	mira.forget()
	print("loaded ", mira.load_conversation(saved))
	var elsewhere := Node.new()
	add_child(elsewhere)
	var namesake := FrameshardNpc.new()
	namesake.name = mira.name
	elsewhere.add_child(namesake)
	check(namesake.load_conversation(saved))
	namesake.forget()
	check(mira.save_conversation() == saved)
	saved.resize(10)
	print("loaded ", mira.load_conversation(saved))
	await mira.error_raised


func lose_the_engine() -> void:
	mira.ask("poison")
	print("engine ", (await sidecar.engine_changed)[0])
	await mira.error_raised
	mira.forget()


func stop_and_free() -> void:
	mira.ask("again and again and again")
	await mira.response_updated
	mira.stop_generation()
	check(not mira.is_speaking())
	mira.ask("the end")
	mira.response_updated.connect(func(_delta: String) -> void: mira.queue_free(), CONNECT_ONE_SHOT)
	await mira.tree_exited
	await get_tree().process_frame
	print("freed")
