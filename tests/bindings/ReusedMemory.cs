using System;
using System.Linq;
using System.Reflection;
using System.Runtime.InteropServices;
using Frameshard;

/// <summary>Polls as if another thread had freed the memory of the C library's events, by Dispose or Poll, before they
/// are raised.</summary>
internal static class ReusedMemory
{
    private const BindingFlags Hidden = BindingFlags.Instance | BindingFlags.NonPublic;

    internal static void Poll(Sidecar sidecar)
    {
        var events = (Native.Event[])typeof(Sidecar).GetField("_buffer", Hidden).GetValue(sidecar);
        Array.Clear(events, 0, events.Length);
        typeof(Sidecar).GetMethod("Fetch", Hidden).Invoke(sidecar, new object[] { events.Length });
        foreach (var fetched in events.Where(item => item.Type != 0))
        {
            if (fetched.Type == Native.EventType.ToolCall)
            {
                Marshal.WriteByte(fetched.CallId, 0);
                Marshal.WriteByte(fetched.Name, 0);
            }
            var count = (int)(fetched.NDim * fetched.NRows);
            if (count > 0) Marshal.Copy(new float[count], 0, fetched.Rows, count);
        }
        sidecar.Poll(events.Count(item => item.Type != 0));
    }
}
