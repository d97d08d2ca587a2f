using System.Reflection;

/// <summary>Fields and methods of a component that Unity, too, finds by their names.</summary>
internal static class ByName
{
    private const BindingFlags Any = BindingFlags.Instance | BindingFlags.NonPublic | BindingFlags.Public;

    internal static object Call(this object component, string name, params object[] arguments) =>
        component.GetType().GetMethod(name, Any).Invoke(component, arguments);

    internal static object Get(this object component, string name) =>
        component.GetType().GetField(name, Any).GetValue(component);

    internal static T Set<T>(this T component, string name, object value)
    {
        component.GetType().GetField(name, Any).SetValue(component, value);
        return component;
    }
}
