using System;
using System.Runtime.InteropServices;

namespace Frameshard
{
    /// <summary>
    /// The frame block: shared memory in which the game tells the sidecar when each frame begins, so that the sidecar
    /// leaves GPU time to frames. Only <see cref="Open"/> may wait or allocate. Any thread may use it, but only one
    /// at a time.
    /// </summary>
    public sealed class FrameBlock : IDisposable
    {
        private readonly FrameBlockHandle _block;

        private FrameBlock(FrameBlockHandle block)
        {
            _block = block;
        }

        /// <summary>Opens the frame block. Throws <see cref="FrameshardException"/> if <paramref name="path"/> is
        /// none.</summary>
        /// <param name="path">Result of <see cref="Sidecar.GetFrameBlockAsync"/>.</param>
        /// <param name="targetFrameSeconds">Time that a frame should take, such as 1.0 / 60.</param>
        public static FrameBlock Open(string path, double targetFrameSeconds)
        {
            using (var texts = new Utf8())
            {
                Sidecar.Check(Native.fs_frame_block_open(texts.Name(path), targetFrameSeconds, out var block));
                return new FrameBlock(block);
            }
        }

        /// <summary>Call it at the start of each frame.</summary>
        public void Begin() => Sidecar.Check(Native.fs_frame_begin(_block));

        /// <summary>Optional: how long the frame kept the GPU busy, if the game measures it.</summary>
        public void End(double gpuBusySeconds) => Sidecar.Check(Native.fs_frame_end(_block, gpuBusySeconds));

        /// <summary>Lets the sidecar use the whole GPU until the next <see cref="Begin"/>, for example in a
        /// menu.</summary>
        public void Idle() => Sidecar.Check(Native.fs_frame_idle(_block));

        /// <summary>Like <see cref="Sidecar.SetBudgetAsync"/>, but faster: the sidecar sees the budget (MiB; 0: no
        /// limit) between two steps of the computation that runs. Returns the generation by which
        /// <see cref="GetAnswer"/> refers to this budget.</summary>
        public ulong SetBudget(double vramBudgetMb)
        {
            Sidecar.Check(Native.fs_frame_set_budget(_block, Sidecar.Bytes(vramBudgetMb), out var generation));
            return generation;
        }

        /// <summary>Returns the sidecar's answer to <see cref="SetBudget"/>.</summary>
        public FrameAnswer GetAnswer()
        {
            var native = new Native.FrameAnswer { StructSize = (uint)Marshal.SizeOf(typeof(Native.FrameAnswer)) };
            Sidecar.Check(Native.fs_frame_get_answer(_block, ref native));
            return new FrameAnswer
            {
                AppliedGeneration = native.AppliedGeneration, RefusedGeneration = native.RefusedGeneration,
                BudgetBytes = native.BudgetBytes, UsedBytes = native.UsedBytes, FloorBytes = native.FloorBytes,
            };
        }

        public void Dispose() => _block.Dispose();
    }

    public struct FrameAnswer
    {
        /// <summary>The newest budget that is in force, with the VRAM above it released.</summary>
        public ulong AppliedGeneration { get; internal set; }
        /// <summary>The newest budget that was refused, because it was below the floor.</summary>
        public ulong RefusedGeneration { get; internal set; }
        public ulong BudgetBytes { get; internal set; }
        public ulong UsedBytes { get; internal set; }
        public ulong FloorBytes { get; internal set; }
    }
}
