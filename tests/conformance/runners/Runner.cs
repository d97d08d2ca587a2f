// The conformance runner of the C# core. tests/conformance/README.md describes its commands and answers.

using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.Json;
using System.Linq;
using System.Text;
using System.Text.RegularExpressions;
using System.Threading.Tasks;
using Frameshard;

internal static class Runner
{
    private const double Mebibyte = 1024 * 1024;

    private static Sidecar _sidecar;
    private static readonly Dictionary<ulong, Job> Jobs = new Dictionary<ulong, Job>();
    private static readonly List<JsonValue> Events = new List<JsonValue>();
    private static long _requests;

    private static void Main()
    {
        var input = new System.IO.StreamReader(Console.OpenStandardInput(), new UTF8Encoding(false));
        var output = new System.IO.StreamWriter(Console.OpenStandardOutput(), new UTF8Encoding(false));
        string line;
        while ((line = input.ReadLine()) != null)
        {
            JsonObject answer;
            try
            {
                answer = Obey((JsonObject)JsonValue.Parse(line));
                answer["ok"] = true;
            }
            catch (FrameshardException error)
            {
                answer = new JsonObject { { "ok", false }, { "error", error.Name } };
            }
            output.Write(answer.ToString() + "\n");
            output.Flush();
        }
        _sidecar?.Dispose();
    }

    private static JsonObject Obey(JsonObject command)
    {
        var none = new JsonObject();
        switch ((string)command["do"])
        {
            case "launch":
                var options = (JsonObject)command["options"];
                var python = (string)options["python"];
                options.Remove("python");
                Use(Sidecar.Launch(new LaunchOptions
                {
                    Model = options.ContainsKey("model") ? (string)options["model"] : "none", Python = python,
                    ExtraJson = options.ToString(),
                }));
                return none;
            case "connect":
                Use(Sidecar.Connect((string)command["file"]));
                return none;
            case "ask":
                return Watch(Client.Ask((string)command["text"], Options(command)));
            case "tool_results":
                var results = command["results"].Cast<JsonValue>().ToDictionary(
                    pair => (string)pair[0], pair => (string)pair[1]);
                return Watch(Client.ToolResults(results, Options(command)));
            case "chat":
                return Watch(Client.Chat(Messages(command), Options(command)));
            case "complete":
                return Watch(Client.Complete((string)command["prompt"], Options(command)));
            case "cancel":
                OpenJob(command).Cancel();
                return none;
            case "set_priority":
                OpenJob(command).SetPriority((uint)command["priority"]);
                return none;
            case "forget":
                Client.Forget((string)command["conversation"]);
                return none;
            case "history":
                var told = Client.History((string)command["conversation"]);
                return new JsonObject { { "messages", new JsonArray(told.Select(MessageOf)) } };
            case "get_http":
                var model = Client.Ready.Result;
                return new JsonObject { { "data", new JsonArray(model.HttpUrl, model.HttpKey) } };
            case "save":
                var saved = Client.Save((string)command["conversation"]);
                return new JsonObject { { "data", BitConverter.ToString(saved).Replace("-", "").ToLowerInvariant() } };
            case "load":
                var hex = (string)command["data"];
                var data = Enumerable.Range(0, hex.Length / 2).Select(
                    index => Convert.ToByte(hex.Substring(2 * index, 2), 16)).ToArray();
                var loaded = Client.Load(data, (string)command["conversation"]);
                return new JsonObject
                {
                    { "same_model", loaded.SameModel }, { "same_template", loaded.SameTemplate },
                };
            case "save_kv":
                var written = Client.SaveKvAsync((string)command["conversation"], (string)command["path"]);
                return Watch("kv", written, KvOf);
            case "load_kv":
                var read = Client.LoadKvAsync((string)command["path"], (string)command["conversation"]);
                return Watch("kv", read, KvOf);
            case "set_lease":
                return Watch(Client.SetLease(LeaseOf((JsonObject)command["lease"])));
            case "get_budget":
                return Watch("budget", Client.GetBudgetAsync(), budget => new JsonObject
                {
                    { "state", Word(budget.State) }, { "version", budget.Version },
                    { "budget_bytes", budget.BudgetBytes }, { "floor_bytes", budget.FloorBytes },
                    { "full_bytes", budget.FullBytes }, { "used_bytes", budget.UsedBytes },
                    { "wanted_bytes", budget.WantedBytes }, { "host_budget_bytes", budget.HostBudgetBytes },
                    { "host_floor_bytes", budget.HostFloorBytes }, { "host_used_bytes", budget.HostUsedBytes },
                });
            case "load_adapter":
                return Watch("adapters", Client.LoadAdapterAsync((string)command["name"], (string)command["path"]),
                    Told);
            case "unload_adapter":
                return Watch("adapters", Client.UnloadAdapterAsync((string)command["name"]), Told);
            case "get_stats":
                return Watch("stats", Client.GetStatsAsync(), detail => new JsonObject
                {
                    { "detail", JsonValue.Parse(detail) },
                });
            case "get_caps":
                return Watch("caps", Client.GetCapsAsync(), caps => new JsonObject
                {
                    { "device", caps.Device }, { "total_bytes", Known(caps.TotalBytes) },
                    { "free_bytes", Known(caps.FreeBytes) }, { "floor_bytes", caps.FloorBytes },
                    { "full_bytes", caps.FullBytes }, { "host_total_bytes", Known(caps.HostTotalBytes) },
                    { "host_free_bytes", Known(caps.HostFreeBytes) }, { "host_floor_bytes", caps.HostFloorBytes },
                });
            case "get_plan":
                var plan = Client.GetPlanAsync((ulong)command["vram_budget_bytes"] / Mebibyte,
                    (uint)command["prompt_tokens"]);
                return Watch("plan", plan, found => new JsonObject
                {
                    { "budget_bytes", found.BudgetBytes }, { "fits", found.Fits },
                    { "ttft_s", found.FirstTokenSeconds }, { "tokens_per_second", found.TokensPerSecond },
                    { "resident_bytes", found.ResidentBytes }, { "streamed_bytes", found.StreamedBytes },
                    { "cpu_bytes", found.CpuBytes },
                });
            case "count_tokens":
                var count = command.ContainsKey("prompt")
                    ? Client.CountTokensAsync((string)command["prompt"])
                    : Client.CountTokensAsync(Messages(command), Tools(command));
                return Watch("token_count", count, found => new JsonObject
                {
                    { "n_tokens", (long)found.NTokens }, { "n_left", (long)found.NLeft },
                });
            case "embed":
                var texts = Texts(command["texts"]);
                return Watch("embeddings", Client.EmbedAsync(texts), found => new JsonObject
                {
                    { "n_dim", (long)found.NDim }, { "n_tokens", (long)found.NTokens },
                    { "cosines", new JsonArray(found.Rows.Select(row => (JsonValue)Dot(found.Rows[0], row))) },
                });
            case "set_pacing":
                Client.SetPacing(Value<SchedulingMode>((string)command["scheduling_mode"]),
                    (double)command["target_tokens_per_second"]);
                return Number("request", ++_requests);
            case "get_frame_block":
                return Watch("frame_block", Client.GetFrameBlockAsync(), path => new JsonObject { { "path", path } });
            case "draw":
                using (var block = FrameBlock.Open((string)command["path"], (double)command["target_frame_s"]))
                {
                    for (var frame = 0; frame < (int)command["frames"]; frame++)
                    {
                        block.Begin();
                        block.End((double)command["gpu_busy_s"]);
                    }
                }
                return none;
            case "poll":
                var clock = Stopwatch.StartNew();
                var left = (double)command["timeout_s"];
                while (Client.Poll((int)command["limit"]) == 0 || Events.Count == 0)
                {
                    var rest = left - clock.Elapsed.TotalSeconds;
                    if (rest <= 0) break;
                    Client.Wait(rest);
                }
                var events = new JsonArray(Events);
                Events.Clear();
                return new JsonObject { { "events", events } };
            case "shutdown":
                Client.Shutdown();
                return none;
            case "close":
                _sidecar?.Dispose();
                _sidecar = null;
                Jobs.Clear();
                Events.Clear();
                return none;
            default:
                throw new FrameshardException(ErrorCode.Unsupported, "no such command");
        }
    }

    private static Sidecar Client =>
        _sidecar ?? throw new FrameshardException(ErrorCode.ConnectionLost, "there is no client");

    private static JsonObject Told(LoadedAdapters adapters)
    {
        return new JsonObject
        {
            { "detail", JsonValue.Parse(adapters.DetailJson) }, { "floor_bytes", adapters.FloorBytes },
        };
    }

    private static double Dot(float[] a, float[] b) => a.Zip(b, (x, y) => (double)x * y).Sum();

    private static ChatMessage[] Messages(JsonObject command) => command["messages"].Cast<JsonValue>().Select(
        said => new ChatMessage((string)said[0], (string)said[1], Calls(said),
            said.Count > 2 && said[2].JsonType == JsonType.String ? (string)said[2] : null)).ToArray();

    private static ToolCall[] Calls(JsonValue said)
    {
        if (said.Count < 3 || said[2].JsonType != JsonType.Array) return null;
        return said[2].Cast<JsonValue>().Select(call => new ToolCall
        {
            CallId = (string)call[0], Name = (string)call[1], Arguments = (string)call[2],
        }).ToArray();
    }

    private static JsonValue MessageOf(ChatMessage message)
    {
        var said = new JsonArray(message.Role, message.Content);
        if (message.ToolCalls != null)
            said.Add(new JsonArray(message.ToolCalls.Select(
                call => (JsonValue)new JsonArray(call.CallId, call.Name, call.Arguments))));
        if (message.ToolCallId != null) said.Add(message.ToolCallId);
        return said;
    }

    private static Tool[] Tools(JsonValue given) => !given.ContainsKey("tools") ? null
        : given["tools"].Cast<JsonValue>().Select(tool => new Tool
        {
            Name = (string)tool["name"], Schema = (string)tool["schema"], Description = (string)tool["description"],
        }).ToArray();

    private static Job OpenJob(JsonObject command)
    {
        if (!Jobs.TryGetValue((ulong)command["job"], out var job) || job.Completion.IsCompleted)
            throw new FrameshardException(ErrorCode.UnknownJob, "no such job");
        return job;
    }

    private static JobOptions Options(JsonObject command)
    {
        if (!command.ContainsKey("options")) return null;
        var given = command["options"];
        var options = new JobOptions();
        if (given.ContainsKey("conversation")) options.Conversation = (string)given["conversation"];
        if (given.ContainsKey("system")) options.System = (string)given["system"];
        if (given.ContainsKey("timeline")) options.Timeline = (ulong)given["timeline"];
        if (given.ContainsKey("window")) options.Window = (uint)given["window"];
        if (given.ContainsKey("sentences")) options.Sentences = (bool)given["sentences"];
        if (given.ContainsKey("warm_up")) options.WarmUp = (bool)given["warm_up"];
        if (given.ContainsKey("local_only")) options.LocalOnly = (bool)given["local_only"];
        if (given.ContainsKey("priority")) options.Priority = (uint)given["priority"];
        if (given.ContainsKey("adapters"))
            options.Adapters = ((JsonObject)given["adapters"]).ToDictionary(each => each.Key, each => (double)each.Value);
        if (given.ContainsKey("deadline_ms")) options.DeadlineMs = (ulong)given["deadline_ms"];
        if (given.ContainsKey("thinking")) options.Thinking = (string)given["thinking"];
        if (given.ContainsKey("thinking_tokens")) options.ThinkingTokens = (ulong)given["thinking_tokens"];
        if (given.ContainsKey("template_keywords")) options.TemplateKeywords = (string)given["template_keywords"];
        options.Tools = Tools(given);
        if (given.ContainsKey("tool_choice")) options.ToolChoice = (string)given["tool_choice"];
        if (!given.ContainsKey("sampling")) return options;
        var wanted = given["sampling"];
        var sampling = options.Sampling = new Sampling();
        if (wanted.ContainsKey("max_tokens")) sampling.MaxTokens = (int)wanted["max_tokens"];
        if (wanted.ContainsKey("temperature")) sampling.Temperature = (double)wanted["temperature"];
        if (wanted.ContainsKey("top_k")) sampling.TopK = (int)wanted["top_k"];
        if (wanted.ContainsKey("top_p")) sampling.TopP = (double)wanted["top_p"];
        if (wanted.ContainsKey("min_p")) sampling.MinP = (double)wanted["min_p"];
        if (wanted.ContainsKey("repeat_penalty")) sampling.RepeatPenalty = (double)wanted["repeat_penalty"];
        if (wanted.ContainsKey("seed")) sampling.Seed = (uint)wanted["seed"];
        if (wanted.ContainsKey("frequency_penalty")) sampling.FrequencyPenalty = (double)wanted["frequency_penalty"];
        if (wanted.ContainsKey("presence_penalty")) sampling.PresencePenalty = (double)wanted["presence_penalty"];
        if (wanted.ContainsKey("typical_p")) sampling.TypicalP = (double)wanted["typical_p"];
        if (wanted.ContainsKey("xtc_probability")) sampling.XtcProbability = (double)wanted["xtc_probability"];
        if (wanted.ContainsKey("xtc_threshold")) sampling.XtcThreshold = (double)wanted["xtc_threshold"];
        if (wanted.ContainsKey("dry_multiplier")) sampling.DryMultiplier = (double)wanted["dry_multiplier"];
        if (wanted.ContainsKey("dry_base")) sampling.DryBase = (double)wanted["dry_base"];
        if (wanted.ContainsKey("stop")) sampling.Stop = Texts(wanted["stop"]);
        if (wanted.ContainsKey("json_schema")) sampling.JsonSchema = (string)wanted["json_schema"];
        if (wanted.ContainsKey("choices")) sampling.Choices = Texts(wanted["choices"]);
        if (wanted.ContainsKey("regex")) sampling.Regex = (string)wanted["regex"];
        if (wanted.ContainsKey("lark")) sampling.Lark = (string)wanted["lark"];
        if (wanted.ContainsKey("logit_bias"))
            sampling.LogitBias = wanted["logit_bias"].Cast<JsonValue>().Select(bias => new LogitBias
            {
                Bias = (double)bias["bias"], Text = bias.ContainsKey("text") ? (string)bias["text"] : null,
                Token = bias.ContainsKey("token") ? (int?)(int)bias["token"] : null,
            }).ToArray();
        return options;
    }

    private static string[] Texts(JsonValue list)
    {
        return list.Cast<JsonValue>().Select(text => (string)text).ToArray();
    }

    private static Lease LeaseOf(JsonObject given)
    {
        var lease = new Lease();
        if (given.ContainsKey("vram_budget_bytes")) lease.VramBudgetMb = (ulong)given["vram_budget_bytes"] / Mebibyte;
        if (given.ContainsKey("floor_bytes")) lease.FloorMb = (ulong)given["floor_bytes"] / Mebibyte;
        if (given.ContainsKey("host_budget_bytes"))
            lease.HostBudgetMb = (ulong)given["host_budget_bytes"] / Mebibyte;
        if (given.ContainsKey("timeout_s")) lease.TimeoutSeconds = (double)given["timeout_s"];
        if (given.ContainsKey("version")) lease.Version = (ulong)given["version"];
        if (given.ContainsKey("reason")) lease.Reason = (string)given["reason"];
        if (given.ContainsKey("state")) lease.State = Value<LeaseState>((string)given["state"]);
        return lease;
    }

    // ---- what it hears: tasks and events of the binding, in the order in which a poll raises them -------------------

    private static void Use(Sidecar sidecar)
    {
        _sidecar = sidecar;
        After(sidecar.Ready, model => Tell("ready", new JsonObject
        {
            { "floor_bytes", model.FloorBytes }, { "full_bytes", model.FullBytes },
            {
                "detail", new JsonObject
                {
                    { "name", model.Name }, { "arch", model.Arch }, { "device", model.Device },
                    { "n_ctx", model.NCtx }, { "n_parallel", model.NParallel }, { "n_vocab", model.NVocab },
                    { "n_layer", model.NLayer }, { "chat", model.Chat }, { "thinks", model.Thinks },
                    { "floor_bytes", model.FloorBytes },
                    { "full_bytes", model.FullBytes }, { "plan", JsonValue.Parse(model.PlanJson) },
                    { "embedder", model.Embedder },
                }
            },
        }));
        sidecar.OnEngineChanged += change => Tell("engine", new JsonObject
        {
            { "state", Word(change.State) }, { "restarts", change.Restarts },
        });
        sidecar.OnNotice += notice => Tell("notice", new JsonObject
        {
            { "kind", Word(notice.Kind) }, { "budget_bytes", notice.BudgetBytes }, { "seconds", notice.Seconds },
            { "text", notice.Text }, { "host_budget_bytes", notice.HostBudgetBytes },
        });
        sidecar.OnLoading += loading => Tell("loading", new JsonObject
        {
            { "stage", Word(loading.Stage) }, { "done", (long)loading.Done }, { "total", (long)loading.Total },
        });
        sidecar.OnRefused += error => Tell("refused", Failure(error));
        sidecar.OnClosed += error => Tell("closed", Failure(error));
    }

    private static JsonObject Watch(Job job)
    {
        Jobs[job.Id] = job;
        JsonObject last = null;
        job.OnToken += text =>
            TellOf(job, "text", last = new JsonObject { { "text", text }, { "sentence_end", false } });
        job.OnSentence += sentence => last["sentence_end"] = true; // raised behind the token that ends it
        job.OnThought += text => TellOf(job, "thought", new JsonObject { { "text", text } });
        job.OnToolCall += call => TellOf(job, "tool_call", new JsonObject
        {
            { "call_id", call.CallId }, { "name", call.Name }, { "arguments", call.Arguments },
        });
        job.OnPaused += () => TellOf(job, "paused", new JsonObject());
        job.OnResumed += () => TellOf(job, "resumed", new JsonObject());
        After(job.Completion, done => TellOf(job, "done", new JsonObject
        {
            { "reason", Word(done.Reason) }, { "n_prompt", done.NPrompt }, { "n_generated", done.NGenerated },
            { "n_reused", (long)done.NReused }, { "n_left", (long)done.NLeft },
            { "n_dropped", (long)done.NDropped }, { "n_thought", (long)done.NThought },
            { "remote", done.Remote },
            { "prefill_s", done.PrefillSeconds }, { "decode_s", done.DecodeSeconds },
        }), error => TellOf(job, "failed", Failure(error)), () => TellOf(job, "cancelled", new JsonObject()));
        return Number("job", (long)job.Id);
    }

    private static JsonObject Watch(LeaseChange change)
    {
        var request = ++_requests;
        After(change.Decided, answer => TellOf(request, "lease", new JsonObject
        {
            { "decision", Word(answer.Decision) }, { "budget_bytes", answer.BudgetBytes },
            { "seconds", answer.Seconds }, { "version", answer.Version },
            { "host_budget_bytes", answer.HostBudgetBytes },
        }));
        After(change.Released, result => TellOf(request, "budget_released", new JsonObject
        {
            { "budget_bytes", result.BudgetBytes }, { "used_bytes", result.UsedBytes }, { "seconds", result.Seconds },
            { "host_budget_bytes", result.HostBudgetBytes }, { "host_used_bytes", result.HostUsedBytes },
        }));
        After(change.Observed, seen => TellOf(request, "budget_observed", new JsonObject
        {
            { "observed_bytes", Known(seen.Bytes) }, { "seconds", seen.Seconds },
            { "host_observed_bytes", Known(seen.HostObservedBytes) },
        }), error => TellOf(request, "refused", Failure(error)));
        return Number("request", request);
    }

    private static JsonObject Watch<T>(string type, Task<T> task, Func<T, JsonObject> read)
    {
        var request = ++_requests;
        After(task, result => TellOf(request, type, read(result)), error => TellOf(request, "refused", Failure(error)));
        return Number("request", request);
    }

    private static void After<T>(Task<T> task, Action<T> done, Action<FrameshardException> failed = null,
        Action cancelled = null)
    {
        task.ContinueWith(ended =>
        {
            if (ended.IsCanceled) cancelled?.Invoke();
            else if (ended.IsFaulted) failed?.Invoke((FrameshardException)ended.Exception.InnerException);
            else done(ended.Result);
        }, TaskContinuationOptions.ExecuteSynchronously);
    }

    private static JsonObject KvOf(KvResult kv) => new JsonObject
    {
        { "n_tokens", kv.NTokens }, { "file_bytes", kv.FileBytes }, { "text", kv.Detail },
    };

    private static JsonObject Failure(FrameshardException error)
    {
        var detail = error.DetailJson.Length > 0 ? JsonValue.Parse(error.DetailJson) : new JsonObject();
        return new JsonObject { { "status", error.Name }, { "detail", detail } };
    }

    private static void Tell(string type, JsonObject fields)
    {
        fields["type"] = type;
        Events.Add(fields);
    }

    private static void TellOf(Job job, string type, JsonObject fields)
    {
        fields["job"] = job.Id;
        fields["timeline"] = job.Timeline;
        Tell(type, fields);
    }

    private static void TellOf(long request, string type, JsonObject fields)
    {
        fields["request"] = request;
        Tell(type, fields);
    }

    private static JsonObject Number(string name, long number) => new JsonObject { { name, number } };

    private static JsonValue Known(long? bytes) => bytes.HasValue ? new JsonPrimitive(bytes.Value) : null;

    // Converts a C# enumerator to the protocol's word: GivesBack to gives_back.
    private static string Word<T>(T value) => Regex.Replace(value.ToString(), "(?<=[a-z])[A-Z]", "_$0").ToLowerInvariant();

    private static T Value<T>(string word) where T : struct =>
        Enum.TryParse<T>(word.Replace("_", ""), true, out var value) ? value : default(T);
}
