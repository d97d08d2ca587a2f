using System;

namespace Frameshard
{
    /// <summary>Fills the structs of frameshard.h. A null option leaves the default that the struct already
    /// has.</summary>
    internal static class Options
    {
        // generated: options
        internal static void Fill(ref Native.LaunchOptions native, LaunchOptions options, Utf8 texts)
        {
            if (options.Model != null) native.Model = texts.Name(options.Model, "Model");
            if (options.Device != null) native.Device = texts.Name(options.Device, "Device");
            native.VramBudgetBytes = Sidecar.Bytes(options.VramBudgetMb);
            native.NCtx = options.NCtx ?? native.NCtx;
            native.NParallel = options.NParallel ?? native.NParallel;
            native.NUbatch = options.NUbatch ?? native.NUbatch;
            native.NThreads = options.NThreads ?? native.NThreads;
            native.SilentS = options.SilentSeconds ?? native.SilentS;
            if (options.Transport != null) native.Transport = texts.Name(options.Transport, "Transport");
            if (options.Endpoint != null) native.Endpoint = texts.Name(options.Endpoint, "Endpoint");
            if (options.ConnectFile != null) native.ConnectFile = texts.Name(options.ConnectFile, "ConnectFile");
            if (options.Python != null) native.Python = texts.Name(options.Python, "Python");
            if (options.LogFile != null) native.LogFile = texts.Name(options.LogFile, "LogFile");
            if (options.ClientName != null) native.ClientName = texts.Name(options.ClientName, "ClientName");
            if (options.ExtraJson != null) native.ExtraJson = texts.Name(options.ExtraJson, "ExtraJson");
            if (options.Mmproj != null) native.Mmproj = texts.Name(options.Mmproj, "Mmproj");
            if (options.Mode != null) native.Mode = texts.Name(options.Mode, "Mode");
            if (options.Speculate != null) native.Speculate = texts.Name(options.Speculate, "Speculate");
            if (options.DraftModel != null) native.DraftModel = texts.Name(options.DraftModel, "DraftModel");
            if (options.KvType != null) native.KvType = texts.Name(options.KvType, "KvType");
            native.MaxJobs = options.MaxJobs ?? native.MaxJobs;
            native.MaxClientJobs = options.MaxClientJobs ?? native.MaxClientJobs;
            native.HeldBytes = options.HeldBytes ?? native.HeldBytes;
            native.HangIdleS = options.HangIdleSeconds ?? native.HangIdleS;
            native.HangBusyS = options.HangBusySeconds ?? native.HangBusyS;
            native.HangLoadS = options.HangLoadSeconds ?? native.HangLoadS;
            native.HangStillS = options.HangStillSeconds ?? native.HangStillS;
            native.RestartLimit = options.RestartLimit ?? native.RestartLimit;
            native.RestartWindowS = options.RestartWindowSeconds ?? native.RestartWindowS;
            native.OffPauseS = options.OffPauseSeconds ?? native.OffPauseS;
            native.OffPauseMaxS = options.OffPauseMaxSeconds ?? native.OffPauseMaxS;
            native.KvCacheBytes = Sidecar.Bytes(options.KvCacheMb);
            if (options.Loading != null) native.Loading = texts.Name(options.Loading, "Loading");
            if (options.Adapters != null) native.Adapters = texts.Names(options.Adapters, "Adapters");
            native.NAdapters = (ulong)(options.Adapters?.Length ?? 0);
            if (options.Http != null) native.Http = texts.Name(options.Http, "Http");
            if (options.HttpKey != null) native.HttpKey = texts.Name(options.HttpKey, "HttpKey");
            if (options.Embedder != null) native.Embedder = texts.Name(options.Embedder, "Embedder");
            if (options.Fallback != null) native.Fallback = texts.Name(options.Fallback, "Fallback");
            if (options.FallbackModel != null)
                native.FallbackModel = texts.Name(options.FallbackModel, "FallbackModel");
            if (options.FallbackKeyFile != null)
                native.FallbackKeyFile = texts.Name(options.FallbackKeyFile, "FallbackKeyFile");
            if (options.FallbackKeyEnv != null)
                native.FallbackKeyEnv = texts.Name(options.FallbackKeyEnv, "FallbackKeyEnv");
            if (options.FallbackHttp != null) native.FallbackHttp = texts.Name(options.FallbackHttp, "FallbackHttp");
            native.HostBudgetBytes = Sidecar.Bytes(options.HostBudgetMb);
        }

        internal static void Fill(ref Native.Sampling native, Sampling options, Utf8 texts)
        {
            native.MaxTokens = options.MaxTokens ?? native.MaxTokens;
            native.TopK = options.TopK ?? native.TopK;
            native.Temperature = options.Temperature ?? native.Temperature;
            native.TopP = options.TopP ?? native.TopP;
            native.MinP = options.MinP ?? native.MinP;
            native.RepeatPenalty = options.RepeatPenalty ?? native.RepeatPenalty;
            native.Seed = options.Seed ?? native.Seed;
            if (options.Stop != null) native.Stop = texts.Names(options.Stop, "Stop");
            native.NStop = (uint)(options.Stop?.Length ?? 0);
            if (options.JsonSchema != null) native.JsonSchema = texts.Name(options.JsonSchema, "JsonSchema");
            native.FrequencyPenalty = options.FrequencyPenalty ?? native.FrequencyPenalty;
            native.PresencePenalty = options.PresencePenalty ?? native.PresencePenalty;
            native.TypicalP = options.TypicalP ?? native.TypicalP;
            native.XtcProbability = options.XtcProbability ?? native.XtcProbability;
            native.XtcThreshold = options.XtcThreshold ?? native.XtcThreshold;
            if (options.Choices != null) native.Choices = texts.Names(options.Choices, "Choices");
            native.NChoices = (ulong)(options.Choices?.Length ?? 0);
            if (options.Regex != null) native.Regex = texts.Name(options.Regex, "Regex");
            if (options.Lark != null) native.Lark = texts.Name(options.Lark, "Lark");
            if (options.LogitBias != null) native.LogitBias = Records(options.LogitBias, texts);
            native.NLogitBias = (ulong)(options.LogitBias?.Length ?? 0);
            native.DryMultiplier = options.DryMultiplier ?? native.DryMultiplier;
            native.DryBase = options.DryBase ?? native.DryBase;
            native.DryAllowedLength = options.DryAllowedLength ?? native.DryAllowedLength;
            native.DryPenaltyLastN = options.DryPenaltyLastN ?? native.DryPenaltyLastN;
            if (options.DrySequenceBreakers != null)
                native.DrySequenceBreakers = texts.Names(options.DrySequenceBreakers, "DrySequenceBreakers");
            native.NDrySequenceBreakers = (ulong)(options.DrySequenceBreakers?.Length ?? 0);
        }

        internal static void Fill(ref Native.Lease native, Lease options, Utf8 texts)
        {
            native.State = (int)options.State;
            native.VramBudgetBytes = Sidecar.Bytes(options.VramBudgetMb);
            native.FloorBytes = Sidecar.Bytes(options.FloorMb);
            native.Version = options.Version;
            native.TimeoutS = options.TimeoutSeconds ?? native.TimeoutS;
            if (options.Reason != null) native.Reason = texts.Name(options.Reason, "Reason");
            if (options.HostBudgetMb.HasValue) native.HostBudgetBytes = (long)Sidecar.Bytes(options.HostBudgetMb.Value);
        }
        // end of options

        private static IntPtr Records(LogitBias[] biases, Utf8 texts)
        {
            return texts.Array(biases, "LogitBias", bias =>
            {
                var native = new Native.LogitBias { Bias = bias.Bias, Token = bias.Token ?? 0 };
                if ((bias.Token == null) == (bias.Text == null))
                    throw new FrameshardException(ErrorCode.BadArgument, "a LogitBias has either a Token or a Text");
                if (bias.Text != null) native.Text = texts.Name(bias.Text, "a LogitBias's Text");
                return native;
            });
        }
    }
}
