#pragma once

#include "Misc/Paths.h"

#include "FrameshardSettings.h"
#include "FrameshardText.h"
#include "FrameshardTypes.h"

#include <frameshard.h>

#include <cmath>
#include <deque>
#include <vector>

/** Keeps converted texts alive during one call into the client library. */
class FFrameshardTexts
{
public:
	/** Returns nullptr, the library's default, for an empty text. */
	const char* Text(const FString& Value)
	{
		return Value.IsEmpty() ? nullptr : Kept.emplace_back(FrameshardUtf8(Value)).c_str();
	}

	/** Converts a path of what the game ships, which may be relative to the project's Content folder. */
	const char* Path(const FString& Value)
	{
		return In(FPaths::ProjectContentDir(), Value);
	}

	/** Converts a path of what is written or private, which may be relative to the project's Saved folder. */
	const char* Saved(const FString& Value)
	{
		return In(FPaths::ProjectSavedDir(), Value);
	}

	/** Converts NAME=PATH, with a path as of Path. */
	const char* const* Adapters(const TArray<FString>& Values)
	{
		TArray<FString> Made;
		for (const FString& Value : Values)
		{
			const std::string Given = FrameshardUtf8(Value);
			const size_t Start = Given.find('=') + 1; // 0: the library refuses it
			const char* File = Start == 0 ? nullptr : Path(FrameshardText(std::string_view(Given).substr(Start)));
			Made.Add(File ? FrameshardText(Given.substr(0, Start) + File) : Value);
		}
		return List(Made);
	}

	const char* const* List(const TArray<FString>& Values)
	{
		std::vector<const char*>& List = Lists.emplace_back();
		for (const FString& Value : Values)
		{
			List.push_back(Kept.emplace_back(FrameshardUtf8(Value)).c_str());
		}
		return List.data();
	}

	std::vector<fs_tool> Tools(const TArray<FFrameshardTool>& Values)
	{
		std::vector<fs_tool> List;
		for (const FFrameshardTool& Value : Values)
		{
			List.push_back({Text(Value.Name), Text(Value.Description), Text(Value.Schema)});
		}
		return List;
	}

	const fs_logit_bias* Records(const TArray<FFrameshardLogitBias>& Values)
	{
		std::vector<fs_logit_bias>& List = Biases.emplace_back();
		for (const FFrameshardLogitBias& Value : Values)
		{
			List.push_back({Text(Value.Text), Value.Token, Value.Bias});
		}
		return List.data();
	}

private:
	const char* In(const FString& Folder, const FString& Value)
	{
		const FString Base = FPaths::ConvertRelativePathToFull(Folder);
		return Value.IsEmpty() ? nullptr : Text(FPaths::ConvertRelativePathToFull(Base, Value));
	}

	std::deque<std::string> Kept;
	std::deque<std::vector<const char*>> Lists;
	std::deque<std::vector<fs_logit_bias>> Biases;
};

constexpr double FrameshardBytesPerMb = 1024.0 * 1024.0;

/** Converts MiB to bytes, rounded up: a size above 0 must not become 0, "no limit". A negative, infinite or undefined size becomes INT64_MAX, which the library
 * refuses for signed and unsigned sizes. */
inline uint64_t FrameshardBytes(double Megabytes)
{
	return Megabytes >= 0 && Megabytes < 1e12 ? static_cast<uint64_t>(std::ceil(Megabytes * FrameshardBytesPerMb)) : INT64_MAX;
}

inline double FrameshardMegabytes(uint64_t Bytes)
{
	return static_cast<double>(Bytes) / FrameshardBytesPerMb;
}

// generated: options
inline void FrameshardFill(fs_launch_options& Made, const UFrameshardSettings& From, FFrameshardTexts& Texts)
{
	Made.model = Texts.Path(From.Model);
	Made.device = Texts.Text(From.Device);
	Made.vram_budget_bytes = FrameshardBytes(From.VramBudgetMb);
	Made.n_ctx = static_cast<decltype(Made.n_ctx)>(From.NCtx);
	Made.n_parallel = static_cast<decltype(Made.n_parallel)>(From.NParallel);
	Made.n_ubatch = static_cast<decltype(Made.n_ubatch)>(From.NUbatch);
	Made.n_threads = static_cast<decltype(Made.n_threads)>(From.NThreads);
	Made.silent_s = static_cast<decltype(Made.silent_s)>(From.SilentSeconds);
	Made.transport = Texts.Text(From.Transport);
	Made.endpoint = Texts.Text(From.Endpoint);
	Made.connect_file = Texts.Saved(From.ConnectFile);
	Made.mmproj = Texts.Path(From.Mmproj);
	Made.mode = Texts.Text(From.Mode);
	Made.speculate = Texts.Text(From.Speculate);
	Made.draft_model = Texts.Path(From.DraftModel);
	Made.kv_type = Texts.Text(From.KvType);
	Made.max_jobs = static_cast<decltype(Made.max_jobs)>(From.MaxJobs);
	Made.max_client_jobs = static_cast<decltype(Made.max_client_jobs)>(From.MaxClientJobs);
	Made.held_bytes = static_cast<decltype(Made.held_bytes)>(From.HeldBytes);
	Made.hang_idle_s = static_cast<decltype(Made.hang_idle_s)>(From.HangIdleSeconds);
	Made.hang_busy_s = static_cast<decltype(Made.hang_busy_s)>(From.HangBusySeconds);
	Made.hang_load_s = static_cast<decltype(Made.hang_load_s)>(From.HangLoadSeconds);
	Made.hang_still_s = static_cast<decltype(Made.hang_still_s)>(From.HangStillSeconds);
	Made.restart_limit = static_cast<decltype(Made.restart_limit)>(From.RestartLimit);
	Made.restart_window_s = static_cast<decltype(Made.restart_window_s)>(From.RestartWindowSeconds);
	Made.off_pause_s = static_cast<decltype(Made.off_pause_s)>(From.OffPauseSeconds);
	Made.off_pause_max_s = static_cast<decltype(Made.off_pause_max_s)>(From.OffPauseMaxSeconds);
	Made.kv_cache_bytes = FrameshardBytes(From.KvCacheMb);
	Made.loading = Texts.Text(From.Loading);
	Made.n_adapters = static_cast<decltype(Made.n_adapters)>(From.Adapters.Num());
	Made.adapters = Texts.Adapters(From.Adapters);
	Made.http = Texts.Text(From.Http);
	Made.http_key = Texts.Text(From.HttpKey);
	Made.embedder = Texts.Path(From.Embedder);
	Made.fallback = Texts.Text(From.Fallback);
	Made.fallback_model = Texts.Text(From.FallbackModel);
	Made.fallback_key_file = Texts.Saved(From.FallbackKeyFile);
	Made.fallback_key_env = Texts.Text(From.FallbackKeyEnv);
	Made.fallback_http = Texts.Text(From.FallbackHttp);
	Made.host_budget_bytes = FrameshardBytes(From.HostBudgetMb);
}

inline void FrameshardFill(fs_sampling& Made, const FFrameshardAskParams& From, FFrameshardTexts& Texts)
{
	Made.max_tokens = static_cast<decltype(Made.max_tokens)>(From.MaxTokens);
	Made.top_k = static_cast<decltype(Made.top_k)>(From.TopK);
	Made.temperature = static_cast<decltype(Made.temperature)>(From.Temperature);
	Made.top_p = static_cast<decltype(Made.top_p)>(From.TopP);
	Made.min_p = static_cast<decltype(Made.min_p)>(From.MinP);
	Made.repeat_penalty = static_cast<decltype(Made.repeat_penalty)>(From.RepeatPenalty);
	Made.seed = From.Seed < 0 ? -1 : From.Seed;
	Made.n_stop = static_cast<decltype(Made.n_stop)>(From.Stop.Num());
	Made.stop = Texts.List(From.Stop);
	Made.json_schema = Texts.Text(From.JsonSchema);
	Made.frequency_penalty = static_cast<decltype(Made.frequency_penalty)>(From.FrequencyPenalty);
	Made.presence_penalty = static_cast<decltype(Made.presence_penalty)>(From.PresencePenalty);
	Made.typical_p = static_cast<decltype(Made.typical_p)>(From.TypicalP);
	Made.xtc_probability = static_cast<decltype(Made.xtc_probability)>(From.XtcProbability);
	Made.xtc_threshold = static_cast<decltype(Made.xtc_threshold)>(From.XtcThreshold);
	Made.n_choices = static_cast<decltype(Made.n_choices)>(From.Choices.Num());
	Made.choices = Texts.List(From.Choices);
	Made.regex = Texts.Text(From.Regex);
	Made.lark = Texts.Text(From.Lark);
	Made.n_logit_bias = static_cast<decltype(Made.n_logit_bias)>(From.LogitBias.Num());
	Made.logit_bias = Texts.Records(From.LogitBias);
	Made.dry_multiplier = static_cast<decltype(Made.dry_multiplier)>(From.DryMultiplier);
	Made.dry_base = static_cast<decltype(Made.dry_base)>(From.DryBase);
	Made.dry_allowed_length = static_cast<decltype(Made.dry_allowed_length)>(From.DryAllowedLength);
	Made.dry_penalty_last_n = static_cast<decltype(Made.dry_penalty_last_n)>(From.DryPenaltyLastN);
	Made.n_dry_sequence_breakers = static_cast<decltype(Made.n_dry_sequence_breakers)>(From.DrySequenceBreakers.Num());
	Made.dry_sequence_breakers = Texts.List(From.DrySequenceBreakers);
}

inline void FrameshardFill(fs_lease& Made, const FFrameshardLease& From, FFrameshardTexts& Texts)
{
	Made.state = static_cast<decltype(Made.state)>(From.State);
	Made.vram_budget_bytes = FrameshardBytes(From.VramBudgetMb);
	Made.floor_bytes = FrameshardBytes(From.FloorMb);
	Made.version = static_cast<decltype(Made.version)>(From.Version);
	Made.timeout_s = static_cast<decltype(Made.timeout_s)>(From.TimeoutSeconds);
	Made.reason = Texts.Text(From.Reason);
	Made.host_budget_bytes = From.HostBudgetMb < 0 ? -1 : static_cast<decltype(Made.host_budget_bytes)>(FrameshardBytes(From.HostBudgetMb));
}
// end of options
