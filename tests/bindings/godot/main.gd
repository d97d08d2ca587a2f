## Asks a sidecar whose engine is a stand-in, and prints what the nodes say.
extends Node

@onready var sidecar: FrameshardSidecar = $Sidecar
@onready var mira: FrameshardNpc = $Mira


func _ready() -> void:
	mira.error_raised.connect(func(error: String, text: String) -> void: print("npc ", error, " ", text.length() > 10))
	mira.ask("too early")
	await mira.error_raised
	check(mira.stop == PackedStringArray(["never", "ever"]) and mira.temperature == 0.0 and mira.max_tokens == 8)
	mira.seed = 3
	check(mira.get("seed") == 3 and mira.persona == "You are Mira: “hello”.")
	await talk()
	await change_budgets()
	await save_and_load()
	await stop_and_free()
	sidecar.close()
	check(not sidecar.is_model_ready())
	get_tree().quit()


func check(holds: bool) -> void:
	if not holds:
		printerr("a check has failed: ", get_stack())
		get_tree().quit(1)


func talk() -> void:
	sidecar.python = OS.get_environment("FRAMESHARD_PYTHON")
	sidecar.extra_json = OS.get_environment("FRAMESHARD_EXTRA")
	sidecar.loading_updated.connect(
		func(stage: String, done: int, total: int) -> void: print("loading ", stage, " ", done, " of ", total))
	var set_mb := sidecar.vram_budget_mb
	sidecar.vram_budget_mb = -1
	sidecar.launch()
	print("launch ", (await sidecar.error_raised)[0])
	sidecar.vram_budget_mb = set_mb
	sidecar.launch()
	var deltas := PackedStringArray()
	mira.response_updated.connect(func(delta: String) -> void: deltas.append(delta))
	var hear := func(sentence: String) -> void: print("sentence '", sentence, "'")
	mira.sentence_finished.connect(hear)
	mira.ask("One two. Three “four”")
	check(mira.is_speaking() and not sidecar.is_model_ready())
	var model: Array = await sidecar.model_ready
	print("model ", model[0], " ", model[1], " ", model[2])
	var answer: String = await mira.response_finished
	mira.sentence_finished.disconnect(hear)
	print("answer '", answer, "' ", "".join(deltas) == answer, " ", mira.is_speaking())


func change_budgets() -> void:
	sidecar.error_raised.connect(
		func(error: String, text: String) -> void: print("sidecar ", error, " ", text.length() > 10))
	sidecar.vram_budget_mb = 64
	print("released ", await sidecar.budget_released)
	await refuse_sizes()
	sidecar.vram_budget_mb = 1
	await sidecar.error_raised
	sidecar.set_lease(64, "parked")
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
	saved.resize(10)
	print("loaded ", mira.load_conversation(saved))
	await mira.error_raised


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
