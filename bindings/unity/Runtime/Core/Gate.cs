using System;
using System.Threading;

namespace Frameshard
{
    /// <summary>A lock that knows whether someone waits for it. A thread that takes it again at once would keep all
    /// others out: a monitor gives them no turn.</summary>
    internal sealed class Gate
    {
        private readonly object _monitor = new object();
        private int _waiting;

        internal bool IsWanted => Volatile.Read(ref _waiting) > 0;

        /// <summary>Takes the lock until the result is disposed. The same thread may take it again.</summary>
        internal Turn Enter()
        {
            Interlocked.Increment(ref _waiting);
            try
            {
                Monitor.Enter(_monitor);
            }
            finally
            {
                Interlocked.Decrement(ref _waiting);
            }
            return new Turn(_monitor);
        }

        internal struct Turn : IDisposable
        {
            private readonly object _monitor;

            internal Turn(object monitor)
            {
                _monitor = monitor;
            }

            public void Dispose() => Monitor.Exit(_monitor);
        }
    }
}
