using System;
using System.Collections.Generic;
using System.Diagnostics;
using System.IO;
using System.Linq;
using System.Runtime.CompilerServices;
using System.Threading;
using System.Threading.Tasks;
using NUnit.Framework;

namespace Frameshard.Tests
{
    /// <summary>
    /// Tests of the core with a real sidecar and a real model. Environment variables: FRAMESHARD_MODEL is the path of
    /// a GGUF file; FRAMESHARD_PYTHON is a Python with frameshard, if not python3; FRAMESHARD_MMPROJ is the path of
    /// the model's vision tower, if it has one.
    /// </summary>
    [TestFixture]
    public sealed class SidecarTests
    {
        private const double Mebibyte = 1024 * 1024;

        private static Sidecar _shared;

        private static Sidecar Launch(string model = null, string connectFile = null)
        {
            var path = model ?? Environment.GetEnvironmentVariable("FRAMESHARD_MODEL");
            if (string.IsNullOrEmpty(path)) Assert.Ignore("FRAMESHARD_MODEL is not set");
            return Sidecar.Launch(new LaunchOptions
            {
                Model = path, Device = "emulated", NCtx = 1024, NParallel = 1,
                Mmproj = Environment.GetEnvironmentVariable("FRAMESHARD_MMPROJ"),
                Python = Environment.GetEnvironmentVariable("FRAMESHARD_PYTHON"), ConnectFile = connectFile,
            });
        }

        /// <summary>A sidecar for all tests that do not end it. It ends with the process.</summary>
        private static Sidecar Shared
        {
            get
            {
                if (_shared == null || _shared.IsClosed) _shared = Launch();
                return _shared;
            }
        }

        private static JobOptions Tokens(int count) =>
            new JobOptions { Sampling = new Sampling { MaxTokens = count, Temperature = 0 } };

        private static FrameshardException Failure(Action action)
        {
            try
            {
                action();
            }
            catch (FrameshardException error)
            {
                return error;
            }
            throw new AssertionException("it did not fail");
        }

        private static bool IsGone(ulong pid)
        {
            try
            {
                using (var process = Process.GetProcessById((int)pid)) return process.HasExited;
            }
            catch (ArgumentException)
            {
                return true;
            }
        }

        private static void WaitUntilGone(ulong pid)
        {
            var clock = Stopwatch.StartNew();
            while (!IsGone(pid))
            {
                Assert.IsTrue(clock.Elapsed.TotalSeconds < 20, "the sidecar is still there");
                Thread.Yield();
            }
        }

        private static void PollUntil(Sidecar sidecar, Func<bool> condition)
        {
            var clock = Stopwatch.StartNew();
            while (!condition())
            {
                Assert.IsTrue(clock.Elapsed.TotalSeconds < 120, "it does not happen");
                if (sidecar.Poll() == 0) sidecar.Wait(0.1);
            }
        }

        [Test]
        public void AnswersArriveInThePollingThread()
        {
            var text = "";
            var threads = new HashSet<int>();
            var answer = Shared.Run(Shared.AskAsync("Any rooms left?", Tokens(12), token =>
            {
                text += token;
                threads.Add(Thread.CurrentThread.ManagedThreadId);
            }));
            Assert.AreEqual(text, answer.Text);
            Assert.AreEqual(12, answer.NGenerated);
            Assert.AreEqual(StopReason.Length, answer.Reason);
            Assert.AreEqual(Thread.CurrentThread.ManagedThreadId, threads.Single());
        }

        [Test]
        public void AnAnswerTellsItsSeed()
        {
            var job = Shared.Ask("Hello!", Tokens(1));
            var answer = Shared.Run(job.Completion);
            Assert.AreEqual(job.Seed, answer.Seed);
            var again = Tokens(1);
            again.Sampling.Seed = answer.Seed == 7 ? 8 : 7u;
            Assert.AreEqual(again.Sampling.Seed, Shared.Run(Shared.AskAsync("Hello!", again)).Seed);
        }

        [Test]
        public void ATokenThatIsCancelledEndsTheAnswer()
        {
            using (var source = new CancellationTokenSource())
            using (var third = new ManualResetEventSlim())
            {
                // From another thread, as a game may do. The answer is too long to end before the call.
                var other = new Thread(() => { third.Wait(); source.Cancel(); });
                other.Start();
                var said = 0;
                var answer = Shared.AskAsync("Tell me a long story.", Tokens(700), token =>
                {
                    if (++said == 3) third.Set();
                }, source.Token);
                PollUntil(Shared, () => answer.IsCompleted);
                third.Set();
                other.Join();
                Assert.IsTrue(answer.IsCanceled);
                Assert.IsTrue(Shared.AskAsync("No.", cancellation: source.Token).IsCanceled);
            }
        }

        [Test]
        public void MemoryMovesInTheMiddleOfAnAnswer()
        {
            var model = Shared.Run(Shared.Ready);
            var half = (model.FloorBytes + model.FullBytes) / 2;
            var job = Shared.Ask("Tell me a long story.", Tokens(200));
            PollUntil(Shared, () => job.Text.Length > 0);
            var change = Shared.SetLease(new Lease { VramBudgetMb = half / Mebibyte, Reason = "a level" });
            Assert.AreEqual(half, Shared.Run(change.Decided).BudgetBytes);
            Assert.LessOrEqual(Shared.Run(change.Released).UsedBytes, half);
            Assert.GreaterOrEqual(Shared.Run(change.Observed).Seconds, 0);
            Assert.IsFalse(job.Completion.IsCompleted);
            Assert.AreEqual(half, Shared.Run(Shared.GetBudgetAsync()).BudgetBytes);
            Shared.Run(Shared.SetBudgetAsync(0));
            job.Cancel();
        }

        [Test]
        public void AHandlerThatThrowsLeavesNoTaskOpen()
        {
            Shared.Run(Shared.Ready);
            Action<BudgetResult> fails = result => throw new InvalidOperationException("a handler has failed");
            Shared.OnBudgetChanged += fails;
            var task = Shared.SetBudgetAsync(0);
            var error = Assert.Throws<InvalidOperationException>(() => PollUntil(Shared, () => false));
            Shared.OnBudgetChanged -= fails;
            Assert.AreEqual("a handler has failed", error.Message);
            Assert.IsTrue(task.IsCompleted);
        }

        [Test]
        public void RefusalsSayWhatIsPossible()
        {
            var floor = Shared.Run(Shared.Ready).FloorBytes;
            var error = Failure(() => Shared.Run(Shared.SetBudgetAsync(1)));
            Assert.AreEqual(ErrorCode.BudgetBelowFloor, error.Code);
            Assert.AreEqual("budget_below_floor", error.Name);
            Assert.IsTrue(error.DetailJson.Contains(floor.ToString()), error.DetailJson);
            error = Failure(() => Shared.Run(Shared.SetBudgetAsync(1e-12))); // the rest of a subtraction
            Assert.AreEqual(ErrorCode.BudgetBelowFloor, error.Code);
            Assert.AreEqual(ErrorCode.BadArgument, Failure(() => Shared.Ask(new string('a', 70000))).Code);
            Assert.AreEqual(ErrorCode.BadArgument, Failure(() => Shared.Ask("half a pair: \ud83d")).Code);
            StringAssert.Contains("from 1 to 1048576", Failure(() => Shared.Ask("Hi", Tokens(2000000))).Message);
            var options = new JobOptions { System = "a\0b" };
            StringAssert.StartsWith("System must not contain a NUL", Failure(() => Shared.Ask("Hi", options)).Message);
            options = new JobOptions { Sampling = new Sampling { Stop = new[] { "a\0b" } } };
            StringAssert.StartsWith("Stop must not contain a NUL", Failure(() => Shared.Ask("Hi", options)).Message);
            options = new JobOptions { Images = new Image[] { null } };
            StringAssert.StartsWith("Images must not contain null", Failure(() => Shared.Ask("Hi", options)).Message);
            Assert.Throws<ArgumentNullException>(() => Sidecar.Launch(null));
        }

        [Test]
        public void CapsAndPlansAreTold()
        {
            var model = Shared.Run(Shared.Ready);
            var caps = Shared.Run(Shared.GetCapsAsync());
            Assert.AreEqual(model.FullBytes, caps.FullBytes);
            var plan = Shared.Run(Shared.GetPlanAsync(model.FullBytes / Mebibyte, 100));
            Assert.IsTrue(plan.Fits);
            Assert.Greater(plan.TokensPerSecond, 0);
            Assert.IsFalse(Shared.Run(Shared.GetPlanAsync(1, 100)).Fits);
        }

        [Test]
        public void AFrameBlockTakesFramesAndBudgets()
        {
            var model = Shared.Run(Shared.Ready);
            Shared.SetPacing(SchedulingMode.PrioritizeGraphics);
            using (var block = FrameBlock.Open(Shared.Run(Shared.GetFrameBlockAsync()), 1.0 / 60))
            {
                block.Begin();
                block.End(0.004);
                var generation = block.SetBudget(model.FullBytes / Mebibyte);
                var job = Shared.Ask("Hello!", Tokens(4));
                PollUntil(Shared, () => block.GetAnswer().AppliedGeneration == generation);
                Assert.AreEqual(model.FloorBytes, block.GetAnswer().FloorBytes);
                Assert.AreEqual(model.FullBytes, block.GetAnswer().BudgetBytes);
                Shared.Run(job.Completion);
                block.Idle();
            }
            Shared.SetPacing(SchedulingMode.Balance);
        }

        [Test]
        public void AnImageIsSeenAndItsProgressTold()
        {
            if (Shared.Run(Shared.Ready).Vision == "") Assert.Ignore("FRAMESHARD_MMPROJ is not set");
            var options = Tokens(4);
            options.Images = new[] { new Image { Format = ImageFormat.Rgb, Width = 8, Height = 8, Data = new byte[192] } };
            var told = new List<Progress>();
            var job = Shared.Ask("What do you see?", options);
            job.OnProgress += told.Add;
            var answer = Shared.Run(job.Completion);
            var words = Shared.Run(Shared.AskAsync("What do you see?", Tokens(4)));
            Assert.Greater(answer.NPrompt, words.NPrompt);
            Assert.IsTrue(told.Any(progress => progress.Phase == Phase.Encode && progress.Total >= 1));
            options.Images[0].Data = new byte[191];
            Assert.AreEqual(ErrorCode.BadArgument, Failure(() => Shared.Ask("And now?", options)).Code);
        }

        [Test]
        public void SavesNeedTheModel()
        {
            using (var sidecar = Launch())
            {
                Assert.AreEqual(ErrorCode.ConnectionLost, Failure(() => sidecar.Save("mira")).Code);
                Assert.AreEqual(ErrorCode.ConnectionLost, Failure(() => sidecar.Load(new byte[0], "mira")).Code);
            }
        }

        [Test]
        public void AModelThatIsMissingIsNamed()
        {
            using (var sidecar = Launch("/no/such/model.gguf"))
            {
                Assert.AreEqual(ErrorCode.ModelNotFound, Failure(() => sidecar.Run(sidecar.Ready)).Code);
                Assert.IsTrue(sidecar.IsClosed);
            }
        }

        /// <summary>Does what Unity does when Play mode ends and starts again.</summary>
        [Test]
        public void AllEndWithCloseAllAndMayBeStartedAgain()
        {
            var pids = new List<ulong>();
            for (var round = 0; round < 2; round++)
            {
                var sidecar = Launch();
                pids.Add(sidecar.Run(sidecar.Ready).Pid);
                var answer = sidecar.AskAsync("Tell me a long story.", Tokens(700));
                Sidecar.CloseAll();
                sidecar.Dispose(); // a second Dispose does nothing
                WaitUntilGone(pids[round]);
                Assert.AreEqual(ErrorCode.ConnectionLost, Failure(() => sidecar.Run(answer)).Code);
                Assert.AreEqual(ErrorCode.ConnectionLost, Failure(() => sidecar.Ask("Still there?")).Code);
                Assert.AreEqual(0, sidecar.Poll());
            }
            Assert.AreNotEqual(pids[0], pids[1]);
        }

        [Test]
        public void ASidecarThatIsForgottenEnds()
        {
            var file = Path.Combine(Path.GetTempPath(), Path.GetRandomFileName());
            var pid = LaunchAndForget(file);
            var clock = Stopwatch.StartNew();
            while (!IsGone(pid))
            {
                Assert.IsTrue(clock.Elapsed.TotalSeconds < 20, "the sidecar is still there");
                GC.Collect();
                GC.WaitForPendingFinalizers();
            }
            Assert.IsFalse(File.Exists(file));
        }

        // Runs in its own thread, so that no reference to the sidecar stays on a stack.
        [MethodImpl(MethodImplOptions.NoInlining)]
        private static ulong LaunchAndForget(string connectFile)
        {
            var pid = 0UL;
            var thread = new Thread(() =>
            {
                var sidecar = Launch(connectFile: connectFile);
                pid = sidecar.Run(sidecar.Ready).Pid;
                Assert.IsTrue(File.Exists(connectFile));
            });
            thread.Start();
            thread.Join();
            return pid;
        }
    }
}
